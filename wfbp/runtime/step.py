"""Events and results of one step; the reducer posts ``GroupReady``, ``Close`` and ``Gather``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from wfbp.comm.backend import Buffer
from wfbp.comm.memory import Dependencies, Stamp
from wfbp.runtime.tuning.profile import StepTimes


@dataclass(slots=True)
class Step:
    """One step's gradients, by the reducer's number of the tensor.

    The training thread writes; the communication thread reads a group's entries after its
    :class:`GroupReady`, and everything after the :class:`Close`.
    """

    number: int
    sources: list[int]  # addresses of the gradients; 0 for none
    owners: list[object]  # None if memory is valid only until the step ends or fails
    missing: list[int]  # by group of backward, number of absent gradients
    requested: bool = False  # whether this rank wants a round at the end of the step
    discards: bool = False
    targets: Sequence[int] = ()  # copies of all-reduced gradients, from the close on; 0: none
    place: int | None = 0  # which call closes the step, below 64; None if this rank cannot know


class GroupReady(NamedTuple):
    """All gradients of a group of backward exist, and those of all groups before it."""

    step: Step
    group: int
    dependencies: Dependencies


class Close(NamedTuple):
    """The step has no more gradients: all its groups may go (once more, if it is sent again)."""

    step: Step
    dependencies: Dependencies


@dataclass(slots=True)
class Gather:
    """Shards are updated, so all-gathers may start; lists are by the reducer's numbers."""

    targets: Sequence[int]  # addresses of whole tensors, to be written
    sources: Sequence[int]  # of whole tensors with this rank's shards; mostly ``targets``
    owners: Sequence[object]  # kept alive until the gathers end
    count: int | None  # number of all-gathers that may start now; None for all
    dependencies: Dependencies


@dataclass(frozen=True, slots=True)
class GroupTime:
    """When one group was packed and travelled: stamps, or what :func:`to_seconds` makes of them."""

    group: int
    start_s: float
    packed_s: float
    end_s: float


@dataclass(slots=True)
class StepResult:
    """Results of a step's messages."""

    present: list[bool]  # by tensor of the plan, whether any rank had a gradient
    requested: bool
    discarded: bool
    steps_agree: bool = True  # whether all ranks are at the same step
    times: list[GroupTime] = field(default_factory=list)


GradientRef = tuple[int, object]
"""Address of a gradient, and the object that keeps it alive."""


class BufferView(NamedTuple):
    """Bytes and address of a reduced tensor, or of this rank's shard unless ``whole``."""

    data: Buffer
    address: int
    whole: bool = True

    @classmethod
    def of(cls, data: Buffer, whole: bool = True) -> BufferView:
        """The view of these bytes of the host."""
        return cls(data, data.__array_interface__["data"][0], whole)


Span = tuple[Stamp, Stamp]


@dataclass(frozen=True, slots=True)
class StepTimestamps:
    """Stamps of one step; see :class:`~wfbp.runtime.tuning.profile.StepTimes`."""

    begun: Stamp  # results of the previous step were there
    ready: Sequence[Stamp]  # by tensor of the plan, as ``forward``
    forward: Sequence[Stamp]
    forward_end: Stamp
    closed: Stamp
    done: Stamp  # results were there
    updates: Sequence[Span]
    waits: Sequence[Span]  # of forward, for all-gathers
    times: Sequence[GroupTime]
    gathers: Sequence[GroupTime]


class MeasuredStep(NamedTuple):
    """The same in seconds: groups' times (gathers first), waits for gathers, and updates."""

    stamps: StepTimes
    times: list[GroupTime]
    waits: list[tuple[float, float]] = []  # noqa: RUF012 - never changed
    updates: list[tuple[float, float]] = []  # noqa: RUF012 - never changed


NOT_MEASURED = MeasuredStep(StepTimes(0.0, [], []), [])
"""Of a step that was only counted."""


def to_seconds(moments: StepTimestamps, at: Callable[[Stamp], float]) -> MeasuredStep:
    """Convert a finished step's stamps; omits spans before its begin, and untimed groups."""
    begun_s = at(moments.begun)
    times = [
        GroupTime(time.group, at(time.start_s), at(time.packed_s), at(time.end_s))
        for time in (*moments.gathers, *moments.times)
        if time.start_s
    ]
    waits = [(at(start), at(end)) for start, end in moments.waits]
    updates = [(at(start), at(end)) for start, end in moments.updates]
    stamps = StepTimes(
        begun_s,
        [at(stamp) for stamp in moments.ready],
        [at(stamp) for stamp in moments.forward],
        at(moments.forward_end),
        at(moments.closed),
        at(moments.done),
        sum(at(time.packed_s) - at(time.start_s) for time in moments.times),
        sum(max(0.0, end_s - max(start_s, begun_s)) for start_s, end_s in updates),
        sum(max(0.0, end_s - max(start_s, begun_s)) for start_s, end_s in waits),
    )
    return MeasuredStep(stamps, times, waits, updates)

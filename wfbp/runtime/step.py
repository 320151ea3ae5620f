"""The facts of one step: what the training thread tells the lane, what comes back, and when.

The reducer posts three events to its lane: :class:`GroupReady`, :class:`Close` and :class:`Gather`.
"""

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

    Args:
        number: the step's.
        sources: where the gradients lie; 0 where there is none.
        owners: kept alive until the step is over; None where another owner keeps the memory only
            until the step is over or fails.
        missing: by group of backward, how many gradients have not appeared.
        requested: whether this rank asks to synchronize at the end of the step.
        discards: whether it discards the step.
        targets: where all-reduced gradients are copied to as they arrive, from the close on; 0 for
            those that stay in their group's buffer.
    """

    number: int
    sources: list[int]
    owners: list[object]
    missing: list[int]
    requested: bool = False
    discards: bool = False
    targets: Sequence[int] = ()


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
    """The training thread has used the reduced shards: all-gathers may go.

    Args:
        targets: addresses of whole tensors, by the reducer's number of the tensor: what arrives is
            written there.
        sources: where whole tensors would begin whose shards this rank has; ``targets`` but for
            tensors that travel in another type, of which every shard is written.
        owners: kept alive until the gathers are over.
        count: how many of the plan's all-gathers may go by now; None for all that are left.
        dependencies: what these have to wait for.
    """

    targets: Sequence[int]
    sources: Sequence[int]
    owners: Sequence[object]
    count: int | None
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
    """The result of a step's messages.

    Args:
        present: by tensor of the plan, whether any rank had a gradient.
        requested: whether any rank asks to synchronize at the end of the step.
        discarded: whether any rank discards the step.
        steps_agree: whether all ranks are at the same step.
        times: when each group travelled.
    """

    present: list[bool]
    requested: bool
    discarded: bool
    steps_agree: bool = True
    times: list[GroupTime] = field(default_factory=list)


GradientRef = tuple[int, object]
"""Where a gradient lies (an address) and what keeps it alive."""


class BufferView(NamedTuple):
    """Bytes and address of a tensor after reduction: all of it if ``whole``, else this rank's
    shard."""

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
    """Stamps of one step; see :class:`~wfbp.runtime.tuning.profile.StepTimes`.

    Args:
        begun: the previous step's results were in hand.
        ready: per tensor of the plan.
        forward: per tensor of the plan.
        forward_end: forward ended.
        closed: the step closed.
        done: the results were in hand.
        updates: the optimizer's updates: at the beginning of the step, and while forward runs.
        waits: forward's waits for all-gathers.
        times: of groups of backward.
        gathers: of all-gathers.
    """

    begun: Stamp
    ready: Sequence[Stamp]
    forward: Sequence[Stamp]
    forward_end: Stamp
    closed: Stamp
    done: Stamp
    updates: Sequence[Span]
    waits: Sequence[Span]
    times: Sequence[GroupTime]
    gathers: Sequence[GroupTime]


class MeasuredStep(NamedTuple):
    """The same in seconds: when all groups travelled (gathers first), and when training waited for
    gathers and updated."""

    stamps: StepTimes
    times: list[GroupTime]
    waits: list[tuple[float, float]] = []  # noqa: RUF012 - never changed
    updates: list[tuple[float, float]] = []  # noqa: RUF012 - never changed


NOT_MEASURED = MeasuredStep(StepTimes(0.0, [], []), [])
"""Of a step that was only counted."""


def to_seconds(moments: StepTimestamps, at: Callable[[Stamp], float]) -> MeasuredStep:
    """Turn the stamps of a step that is over into seconds, by ``at``.

    Spans that ended before the step began do not count: gradients may have been discarded since.
    Groups that were not timed are left out.
    """
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

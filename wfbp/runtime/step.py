"""What is known of one step: its gradients, its events and its time stamps.

The training thread tells the executor of a step by a :class:`Step`, by indices of tensors that are
ready, by ``CLOSE`` or ``DISCARD``, and by :class:`GatherRequest`. A :class:`BufferView` says where
a tensor lies after reduction. :class:`StepTimestamps` are moments of a step before they are
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.runtime.tuning.profile import StepTimes

CLOSE = -1
DISCARD = -2


@dataclass(slots=True)
class Step:
    """What the training thread tells of one step, indexed by the plan's tensors.

    The training thread writes; the communication thread reads a tensor's entries only after its
    ready event, and everything after the close.

    Args:
        number: the step's.
        addresses: where the gradients lie; 0 where there is none.
        owners: kept alive until the step is over; None where the memory is somebody else's, who
            keeps it only until the step is over or fails.
        requested: whether this rank asks to synchronize at the end of the step.
        discards: whether it discards the step.
        targets: where all-reduced gradients are copied to as they arrive, from the close on; 0 for
            those that stay in their fusion buffer.
        dependencies: of a device, events that groups have to wait for, by group.
    """

    number: int
    addresses: list[int]
    owners: list[object]
    requested: bool = False
    discards: bool = False
    targets: list[int] = field(default_factory=list)
    dependencies: dict[int, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatherRequest:
    """The training thread has put the reduced shards to use: all-gathers may go.

    Args:
        addresses: of whole tensors, indexed by the plan's tensors: where this rank's shards are
            sent from and the others' are written. 0 for tensors that are not gathered.
        owners: kept alive until the gathers are over.
        count: how many of the plan's all-gathers may go by now; None for all that are left.
        dependencies: of a device, events that they have to wait for.
    """

    addresses: list[int]
    owners: object
    count: int | None = None
    dependencies: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class GroupTime:
    """When one group was packed and travelled, seconds of ``time.perf_counter``.

    (On a device they are timed events until they are read; see :func:`to_seconds`.)
    """

    group: int
    start_s: float
    packed_s: float
    end_s: float


@dataclass(slots=True)
class StepResult:
    """What a step's messages brought.

    Args:
        present: per tensor of the plan, whether any rank had a gradient.
        requested: whether any rank asks to synchronize at the end of the step.
        discarded: whether any rank discards the step.
        times: when each group travelled.
    """

    present: list[bool]
    requested: bool = False
    discarded: bool = False
    times: list[GroupTime] = field(default_factory=list)


GradientRef = tuple[int, object]
"""Where a gradient lies (an address) and what keeps it alive."""


class BufferView(NamedTuple):
    """Where a tensor lies after reduction: the bytes, and their address.

    ``whole`` tells whether they are all of the tensor or this rank's shard of it.
    """

    data: Buffer
    address: int
    whole: bool = True

    @classmethod
    def of(cls, data: Buffer, whole: bool = True) -> BufferView:
        """The slot that these bytes are."""
        return cls(data, data.__array_interface__["data"][0], whole)


EMPTY_VIEW = BufferView(np.empty(0, np.uint8), 0)

Timestamp = Any
"""A moment: seconds on the host, a timed event on a device; 0 is "did not"."""

Span = tuple[Timestamp, Timestamp]


@dataclass(frozen=True, slots=True)
class StepTimestamps:
    """When things happened in one step; see :class:`~wfbp.runtime.tuning.profile.StepTimes`.

    Args:
        begun: the previous step's results were in hand.
        ready: per tensor.
        forward: per tensor.
        forward_end: forward ended.
        closed: the step closed.
        done: the results were in hand.
        update: the optimizer's update at the beginning of the step.
        waits: forward's waits for all-gathers.
        times: of groups that travelled in backward.
        gathers: of all-gathers.
    """

    begun: Timestamp
    ready: Sequence[Timestamp]
    forward: Sequence[Timestamp]
    forward_end: Timestamp
    closed: Timestamp
    done: Timestamp
    update: Span
    waits: Sequence[Span]
    times: Sequence[GroupTime]
    gathers: Sequence[GroupTime]


class MeasuredStep(NamedTuple):
    """The same in seconds: when all groups travelled (gathers first), and when training waited for
    gathers and updated."""

    stamps: StepTimes
    times: list[GroupTime]
    waits: list[tuple[float, float]] = []  # noqa: RUF012 - never changed
    update: tuple[float, float] = (0.0, 0.0)


NOT_MEASURED = MeasuredStep(StepTimes(0.0, [], []), [])
"""Of a step that was not measured."""


def to_seconds(marks: StepTimestamps, at: Callable[[Timestamp], float]) -> MeasuredStep:
    """Turn moments into seconds. What was over before the step began is no part of it: gradients
    may have been forgotten since.

    Args:
        marks: of a step that is over.
        at: the seconds of a moment.
    """
    times = [_seconds(time, at) for time in marks.times]
    begun_s = at(marks.begun)
    stamps = StepTimes(
        begun_s,
        [at(stamp) for stamp in marks.ready],
        [at(stamp) for stamp in marks.forward],
        at(marks.forward_end),
        at(marks.closed),
        at(marks.done),
        sum(t.packed_s - t.start_s for t in times),
        _length([marks.update], at, begun_s),
        _length(marks.waits, at, begun_s),
    )
    gathers = [_seconds(time, at) for time in marks.gathers]
    waits = [(at(start), at(end)) for start, end in marks.waits]
    return MeasuredStep(
        stamps, [*gathers, *times], waits, (at(marks.update[0]), at(marks.update[1]))
    )


def _seconds(time: GroupTime, at: Callable[[Timestamp], float]) -> GroupTime:
    return GroupTime(time.group, at(time.start_s), at(time.packed_s), at(time.end_s))


def _length(spans: Sequence[Span], at: Callable[[Timestamp], float], begun_s: float) -> float:
    return sum(max(0.0, at(end) - max(at(start), begun_s)) for start, end in spans)

"""The facts of one step: its gradients, its events and its time stamps.

The training thread sends the executor a :class:`Step`, indices of tensors that are ready, ``CLOSE``
or ``DISCARD``, and :class:`GatherRequest`. A :class:`BufferView` says where a tensor lies after
reduction. :class:`StepTimestamps` are stamps of the transport, not yet seconds.
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
    """One step, indexed by the plan's tensors.

    The training thread writes; the communication thread reads a tensor's entries only after its
    ready event, and everything after the close.

    Args:
        number: the step's.
        addresses: where the gradients lie; 0 where there is none.
        owners: kept alive until the step is over; None where another owner keeps the memory only
            until the step is over or fails.
        requested: whether this rank asks to synchronize at the end of the step.
        discards: whether it discards the step.
        targets: where all-reduced gradients are copied to as they arrive, from the close on; 0 for
            those that stay in their fusion buffer.
        dependencies: on a device, events for which groups have to wait, by group.
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
    """The training thread has used the reduced shards: all-gathers may go.

    Args:
        addresses: of whole tensors, indexed by the plan's tensors: what arrives is written there. 0
            for tensors that are not gathered.
        owners: kept alive until the gathers are over.
        sources: where whole tensors would begin whose shards this rank has; ``addresses`` but for
            tensors that travel in another type, of which every shard is written.
        count: how many of the plan's all-gathers may go by now; None for all that are left.
        dependencies: on a device, events for which they have to wait.
    """

    addresses: list[int]
    owners: object
    sources: list[int]
    count: int | None = None
    dependencies: Sequence[Any] = ()


NO_GATHER = GatherRequest([], None, [])
"""Before the first one of a plan."""


@dataclass(frozen=True, slots=True)
class GroupTime:
    """When one group was packed and travelled, seconds of ``time.perf_counter``; on a device timed
    events, until :func:`to_seconds` reads them."""

    group: int
    start_s: float
    packed_s: float
    end_s: float


@dataclass(slots=True)
class StepResult:
    """The result of a step's messages.

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
    """Bytes and address of a tensor after reduction: all of it if ``whole``, else this rank's
    shard."""

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
    """Moments of one step; see :class:`~wfbp.runtime.tuning.profile.StepTimes`.

    Args:
        begun: the previous step's results were in hand.
        ready: per tensor.
        forward: per tensor.
        forward_end: forward ended.
        closed: the step closed.
        done: the results were in hand.
        updates: the optimizer's updates: at the beginning of the step, and while forward runs.
        waits: forward's waits for all-gathers.
        times: of groups of backward.
        gathers: of all-gathers.
    """

    begun: Timestamp
    ready: Sequence[Timestamp]
    forward: Sequence[Timestamp]
    forward_end: Timestamp
    closed: Timestamp
    done: Timestamp
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
"""Of a step that was not measured."""


def to_seconds(moments: StepTimestamps, at: Callable[[Timestamp], float]) -> MeasuredStep:
    """Turn the moments of a step that is over into seconds, by ``at``.

    What was over before the step began is no part of it: gradients may have been discarded since.
    """
    times = [_seconds(time, at) for time in moments.times]
    begun_s = at(moments.begun)
    stamps = StepTimes(
        begun_s,
        [at(stamp) for stamp in moments.ready],
        [at(stamp) for stamp in moments.forward],
        at(moments.forward_end),
        at(moments.closed),
        at(moments.done),
        sum(t.packed_s - t.start_s for t in times),
        _length(moments.updates, at, begun_s),
        _length(moments.waits, at, begun_s),
    )
    gathers = [_seconds(time, at) for time in moments.gathers]
    waits = [(at(start), at(end)) for start, end in moments.waits]
    updates = [(at(start), at(end)) for start, end in moments.updates]
    return MeasuredStep(stamps, [*gathers, *times], waits, updates)


def _seconds(time: GroupTime, at: Callable[[Timestamp], float]) -> GroupTime:
    return GroupTime(time.group, at(time.start_s), at(time.packed_s), at(time.end_s))


def _length(spans: Sequence[Span], at: Callable[[Timestamp], float], begun_s: float) -> float:
    return sum(max(0.0, at(end) - max(at(start), begun_s)) for start, end in spans)

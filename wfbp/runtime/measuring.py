"""Times of one reducer's steps: stamps while a step runs, seconds once it is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wfbp.comm.memory import Dependencies, Memory, Stamp
from wfbp.runtime.step import GroupTime

_MOST_UPDATES = 4096
"""The number of updates that are kept until a step with gradients follows."""

Span = tuple[Stamp, Stamp]


@dataclass(slots=True)
class StepTimes:
    """Time stamps of one step, seconds of ``time.perf_counter``; 0 if it did not happen."""

    begun_s: float  # the previous step's results were available
    ready_s: list[float]  # per tensor: its gradient existed
    forward_s: list[float]  # per tensor: its first use in forward, if the adapter can tell
    forward_end_s: float = 0.0  # if the adapter can tell
    closed_s: float = 0.0  # the step closed
    done_s: float = 0.0  # the results were available
    packing_s: float = 0.0  # duration of all packing
    update_s: float = 0.0  # duration of updates, at the step's beginning and in forward
    waited_s: float = 0.0  # how long forward waited for all-gathers


@dataclass(frozen=True, slots=True)
class StepTimestamps:
    """Stamps of one step; see :class:`StepTimes`."""

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
    packing_s = update_s = waited_s = 0.0
    for time in moments.times:
        packing_s += at(time.packed_s) - at(time.start_s)
    for start_s, end_s in updates:
        update_s += max(0.0, end_s - max(start_s, begun_s))
    for start_s, end_s in waits:
        waited_s += max(0.0, end_s - max(start_s, begun_s))
    stamps = StepTimes(
        begun_s,
        list(map(at, moments.ready)),
        list(map(at, moments.forward)),
        at(moments.forward_end),
        at(moments.closed),
        at(moments.done),
        packing_s,
        update_s,
        waited_s,
    )
    return MeasuredStep(stamps, times, waits, updates)


class Visit:
    """The steps that run by one plan: counts them, and keeps the last ones, which count."""

    def __init__(self, num_cold: int, num_counted: int) -> None:
        self.left = num_cold + num_counted
        self.steps: deque[StepTimes] = deque(maxlen=num_counted)
        self.cold_s: float | None = None  # of the latest step that does not count

    def add(self, stamps: StepTimes) -> bool:
        """Record a step; whether it was the last one."""
        self.left -= 1
        if self.left < (self.steps.maxlen or 0):
            self.steps.append(stamps)
        else:
            self.cold_s = stamps.done_s - stamps.begun_s or None
        return not self.left


class StepClock:
    """Notes the moments of the open step, and keeps finished ones until they can be read.

    Used by the training thread. The thread that marks a gradient writes ``ready``; one that waits
    for an all-gather, under the reducer's lock, appends to ``waits`` and ``gathers``.
    """

    def __init__(self, memory: Memory, num_tensors: int) -> None:
        self._memory = memory
        self._num_tensors = num_tensors
        self._kept: deque[StepTimestamps] = deque()
        self._updates: deque[Span] = deque(maxlen=_MOST_UPDATES)
        self.waits: list[Span] = []
        self.gathers: list[GroupTime] = []
        self.begin(memory.now())

    def begin(self, now: Stamp) -> None:
        """Open a step: nothing has happened since ``now``."""
        self.begun = now
        self.closed: Stamp = 0.0
        self.ready: list[Stamp] = [0.0] * self._num_tensors
        self._forward: list[Stamp] = [0.0] * self._num_tensors
        self._forward_end: Stamp = 0.0

    def mark_forward(self, index: int) -> None:
        """A tensor is used for the first time in this step's forward."""
        if not self._forward[index]:
            self._forward[index] = self._memory.now()

    def mark_forward_end(self) -> None:
        """Forward has ended, as far as is known yet."""
        self._forward_end = self._memory.now()

    def start_update(self) -> Stamp:
        """The present moment, for :meth:`mark_update`; 0 if updates are not timed now."""
        return self._memory.now() if self._memory.timing else 0.0

    def mark_update(self, start: Stamp) -> None:
        """An update by the optimizer, begun at ``start``, has ended."""
        if start:
            self._updates.append((start, self._memory.now()))

    def close(self) -> Dependencies:
        """The step closes; returns dependencies that cover all training work so far."""
        self.closed, dependencies = self._memory.close()
        return dependencies

    def finish(self, tensors: Sequence[int], times: Sequence[GroupTime], done: Stamp) -> None:
        """Keep the closed step, with the moments of these tensors."""
        ready, forward = self.ready, self._forward
        self._kept.append(
            StepTimestamps(
                self.begun,
                [ready[k] for k in tensors],
                [forward[k] for k in tensors],
                self._forward_end,
                self.closed,
                done,
                list(self._updates),
                self.waits,
                times,
                self.gathers,
            )
        )
        self._updates.clear()
        self.waits, self.gathers = [], []

    def take(self, counting: bool, measuring: bool) -> Iterator[MeasuredStep]:
        """Take finished steps that can be read; while ``measuring``, the same ones on every rank.

        While ``counting`` none is: a wait for a device would cost more than the step.
        """
        memory, kept = self._memory, self._kept
        if memory.lag_steps and counting:
            kept.clear()
            yield NOT_MEASURED
            return
        while kept and (len(kept) > memory.lag_steps if measuring else memory.done(kept[0].done)):
            moments = kept.popleft()
            yield to_seconds(moments, memory.clock(moments.begun, moments.done))

    def forget(self) -> None:
        """Drop finished steps, which ran by another plan."""
        self._kept.clear()
        self.gathers = []

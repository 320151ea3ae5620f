"""Times of one reducer's steps: stamps while a step runs, seconds once it is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wfbp.comm.memory import Dependencies, Memory, Stamp
from wfbp.runtime.step import GroupTime

_MOST_UPDATES = 4096
"""The number of updates that are kept until a step with gradients follows."""

Span = tuple[Stamp, Stamp]


@dataclass(slots=True)
class StepTimes:
    """Moments of one step: stamps, or seconds of ``time.perf_counter``; 0 if it did not happen."""

    begun_s: Stamp  # the previous step's results were available
    ready_s: Sequence[Stamp]  # per tensor of the plan: its gradient existed
    forward_s: Sequence[Stamp]  # per tensor: its first use in forward, if the adapter can tell
    forward_end_s: Stamp = 0.0  # if the adapter can tell
    closed_s: Stamp = 0.0  # the step closed
    done_s: Stamp = 0.0  # the results were available
    groups: Sequence[GroupTime] = ()  # of backward
    gathers: Sequence[GroupTime] = ()  # of forward
    updates: Sequence[Span] = ()  # by the optimizer, at the step's beginning and in forward
    waits: Sequence[Span] = ()  # of forward, for all-gathers

    def to_seconds(self, at: Callable[[Stamp], float]) -> StepTimes:
        """The moments of a finished step in seconds, without untimed groups."""

        def times(groups: Sequence[GroupTime]) -> list[GroupTime]:
            return [
                GroupTime(t.group, at(t.start_s), at(t.packed_s), at(t.end_s))
                for t in groups
                if t.start_s
            ]

        def spans(pairs: Sequence[Span]) -> list[Span]:
            return [(at(start), at(end)) for start, end in pairs]

        return StepTimes(
            at(self.begun_s),
            list(map(at, self.ready_s)),
            list(map(at, self.forward_s)),
            at(self.forward_end_s),
            at(self.closed_s),
            at(self.done_s),
            times(self.groups),
            times(self.gathers),
            spans(self.updates),
            spans(self.waits),
        )

    # Of a step in seconds.

    @property
    def length_s(self) -> float:
        """Duration of the step."""
        return float(self.done_s - self.begun_s)

    @property
    def exposed_s(self) -> float:
        """How long training waited for communication."""
        return float(self.done_s - self.closed_s + self.waited_s)

    @property
    def packing_s(self) -> float:
        """How long groups of backward were packed."""
        return sum(time.packed_s - time.start_s for time in self.groups)

    @property
    def update_s(self) -> float:
        """How long the optimizer updated tensors."""
        return self._length_s(self.updates)

    @property
    def waited_s(self) -> float:
        """How long forward waited for all-gathers."""
        return self._length_s(self.waits)

    def _length_s(self, spans: Sequence[Span]) -> float:
        begun_s: float = self.begun_s
        return sum((max(0.0, end - max(start, begun_s)) for start, end in spans), 0.0)


NOT_MEASURED = StepTimes(0.0, [], [])
"""Of a step that was only counted."""


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
            self.cold_s = stamps.length_s or None
        return not self.left


class StepClock:
    """Notes the moments of the open step, and keeps finished ones until they can be read.

    Used by the training thread. The thread that marks a gradient writes ``ready``; one that waits
    for an all-gather, under the reducer's lock, appends to ``waits`` and ``gathers``.
    """

    def __init__(self, memory: Memory, num_tensors: int) -> None:
        self._memory = memory
        self._num_tensors = num_tensors
        self._kept: deque[StepTimes] = deque()
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
            StepTimes(
                self.begun,
                [ready[k] for k in tensors],
                [forward[k] for k in tensors],
                self._forward_end,
                self.closed,
                done,
                times,
                self.gathers,
                list(self._updates),
                self.waits,
            )
        )
        self._updates.clear()
        self.waits, self.gathers = [], []

    def take(self, counting: bool, measuring: bool) -> Iterator[StepTimes]:
        """Take finished steps that can be read; while ``measuring``, the same ones on every rank.

        While ``counting`` none is: a wait for a device would cost more than the step.
        """
        memory, kept = self._memory, self._kept
        if memory.lag_steps and counting:
            kept.clear()
            yield NOT_MEASURED
            return
        while kept and (len(kept) > memory.lag_steps if measuring else memory.done(kept[0].done_s)):
            step = kept.popleft()
            yield step.to_seconds(memory.clock(step.begun_s, step.done_s))

    def forget(self) -> None:
        """Drop finished steps, which ran by another plan."""
        self._kept.clear()
        self.gathers = []

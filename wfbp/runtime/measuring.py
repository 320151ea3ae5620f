"""Times of one reducer's steps: stamps while a step runs, seconds once it is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from wfbp.comm.memory import Dependencies, Memory, Stamp
from wfbp.runtime.step import GroupStamps

_MOST_UPDATES = 4096
"""The number of updates that are kept until a step with gradients follows."""

Span = tuple[Stamp, Stamp]


@dataclass(slots=True)
class StepStamps:
    """Stamps of one step, 0 for what did not happen."""

    begun: Stamp  # the previous step's results were available
    ready: Sequence[Stamp]  # per tensor of the plan: its gradient existed
    forward: Sequence[Stamp]  # per tensor: its first use in forward, if the adapter can tell
    forward_end: Stamp  # if the adapter can tell
    closed: Stamp  # the step closed
    done: Stamp  # the results were available
    groups: Sequence[GroupStamps]  # of backward
    gathers: Sequence[GroupStamps]  # of forward
    updates: Sequence[Span]  # by the optimizer, at the step's beginning and in forward
    waits: Sequence[Span]  # of forward, for all-gathers

    def in_seconds(self, at: Callable[[Stamp], float]) -> StepTimes:
        """The step's times, once it is done, by a function from stamps to seconds."""

        def times(groups: Sequence[GroupStamps]) -> list[GroupTime]:
            return [
                GroupTime(g.group, at(g.start), at(g.packed), at(g.end)) for g in groups if g.start
            ]

        def spans(pairs: Sequence[Span]) -> list[tuple[float, float]]:
            return [(at(start), at(end)) for start, end in pairs]

        return StepTimes(
            at(self.begun),
            list(map(at, self.ready)),
            list(map(at, self.forward)),
            at(self.forward_end),
            at(self.closed),
            at(self.done),
            times(self.groups),
            times(self.gathers),
            spans(self.updates),
            spans(self.waits),
        )


@dataclass(frozen=True, slots=True)
class GroupTime:
    """When one group was packed and travelled, in seconds as in :class:`StepTimes`."""

    group: int
    start_s: float
    packed_s: float
    end_s: float


@dataclass(slots=True)
class StepTimes:
    """The moments of :class:`StepStamps` in seconds of ``time.perf_counter``, or on a device since
    a second before the step began; 0 for what did not happen. Groups without times are left out."""

    begun_s: float
    ready_s: Sequence[float]
    forward_s: Sequence[float]
    forward_end_s: float = 0.0
    closed_s: float = 0.0
    done_s: float = 0.0
    groups: Sequence[GroupTime] = ()
    gathers: Sequence[GroupTime] = ()
    updates: Sequence[tuple[float, float]] = ()
    waits: Sequence[tuple[float, float]] = ()

    @property
    def length_s(self) -> float:
        """Duration of the step."""
        return self.done_s - self.begun_s

    @property
    def computed_s(self) -> float:
        """How long the step computed, if nothing was sent meanwhile: less its waits in forward."""
        return max(0.0, self.closed_s - self.begun_s - self.waited_s)

    @property
    def exposed_s(self) -> float:
        """How long training waited for communication."""
        return self.done_s - self.closed_s + self.waited_s

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

    def _length_s(self, spans: Sequence[tuple[float, float]]) -> float:
        return sum((max(0.0, end - max(start, self.begun_s)) for start, end in spans), 0.0)


NOT_MEASURED = StepTimes(0.0, [], [])
"""Of a step that was only counted."""


class Visit:
    """The steps that run by one plan: counts them, and keeps the last ones, which count."""

    def __init__(self, num_cold: int, num_counted: int) -> None:
        self.left = num_cold + num_counted
        self.steps: deque[StepTimes] = deque(maxlen=num_counted)
        self.cold_s: float | None = None  # of the latest step that does not count

    def add(self, times: StepTimes) -> bool:
        """Record a step; whether it was the last one."""
        self.left -= 1
        if self.left < (self.steps.maxlen or 0):
            self.steps.append(times)
        else:
            self.cold_s = times.length_s or None
        return not self.left


class StepClock:
    """Notes the moments of the open step, and keeps finished ones until they can be read.

    Used by the training thread. The thread that marks a gradient writes ``ready``; one that waits
    for an all-gather, under the reducer's lock, appends to ``waits`` and ``gathers``.
    """

    def __init__(self, memory: Memory, num_tensors: int) -> None:
        self._memory = memory
        self._num_tensors = num_tensors
        self._kept: deque[StepStamps] = deque()
        self._updates: deque[Span] = deque(maxlen=_MOST_UPDATES)
        self.waits: list[Span] = []
        self.gathers: list[GroupStamps] = []
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

    def finish(self, tensors: Sequence[int], groups: Sequence[GroupStamps], done: Stamp) -> None:
        """Keep the closed step, with the moments of these tensors."""
        ready, forward = self.ready, self._forward
        self._kept.append(
            StepStamps(
                self.begun,
                [ready[k] for k in tensors],
                [forward[k] for k in tensors],
                self._forward_end,
                self.closed,
                done,
                groups,
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
        while kept and (len(kept) > memory.lag_steps if measuring else memory.done(kept[0].done)):
            step = kept.popleft()
            yield step.in_seconds(memory.clock(step.begun, step.done))

    def forget(self) -> None:
        """Drop finished steps, which ran by another plan."""
        self._kept.clear()
        self.gathers = []

"""Decides what is sent next: a pure state machine over the steps of a plan.

Events go in (a tensor is ready, the step closes, a group has completed); what to do comes out.
The runtime drives it with real events, the simulator with a virtual clock, so both take the same
decisions. No threads, no clock, no I/O.
"""

from __future__ import annotations

import heapq
from collections import deque

from wfbp.core.plan import Plan
from wfbp.core.types import Phase


class Sequencer:
    """Lets groups go in the plan's order, each when its tensors are ready, a few at a time.

    Ready groups wait in a priority queue whose priority is the plan's order. That order is the same
    on every rank, so ranks never start different collectives; a ready group therefore waits for an
    unready one before it. The last group of backward carries the ranks' requests to synchronize, so
    it goes only once the step is closed.

    All-gathers become ready together, by :meth:`gather`, when the reduced shards have been used.
    They may last into the next step: :meth:`next_step` keeps them, and they go before all groups of
    the step that follows.

    Not thread-safe.

    Args:
        plan: what to send.
        window: groups under way at once. One is the model of the papers; two keep a link busy
            until the completion of the first is noticed.

    Example:
        >>> from wfbp.core.plan import Group, Plan
        >>> from wfbp.core.types import TensorSpec
        >>> specs = tuple(TensorSpec(n, (4,), "float32") for n in "ab")
        >>> sequencer = Sequencer(Plan("wfbp", specs, (Group((1,)), Group((0,)))))
        >>> sequencer.ready(1); sequencer.start_next()
        0
        >>> sequencer.ready(0); sequencer.close(); sequencer.start_next() is None
        True
        >>> sequencer.completed(0); sequencer.start_next()
        1
        >>> sequencer.completed(1); sequencer.done
        True
    """

    def __init__(self, plan: Plan, window: int = 1) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; expected at least 1")
        self._window = window
        self._overlap = plan.overlap
        self._num_backward = plan.num_backward
        self._num_groups = len(plan.groups)
        self._sizes = [
            len(group.tensors) if group.phase is Phase.BACKWARD else 0 for group in plan.groups
        ]
        self._group_of = [0] * len(plan.tensors)
        self._gather_of: dict[int, int] = {}
        for index, group in enumerate(plan.groups):
            for k in group.tensors:
                if group.phase is Phase.BACKWARD:
                    self._group_of[k] = index
                else:
                    self._gather_of[k] = index
        self.reset()

    def reset(self) -> None:
        """Begin a step, whatever became of the one before."""
        self._gathers: deque[int] = deque()
        self._gathering: set[int] = set()
        self._num_held = 0
        self._begin()

    def next_step(self) -> None:
        """Begin the next step; all-gathers that have not completed go on.

        Raises ``ValueError`` if groups of backward have not completed.
        """
        if not self._reduced:
            raise ValueError("the next step cannot begin before all groups of backward completed")
        self._begin()

    def discard(self) -> None:
        """Begin the step anew, without ready tensors; none of its groups may have started."""
        self._begin()

    def _begin(self) -> None:
        self._missing = list(self._sizes)
        self._queue: list[int] = []
        self._started = 0
        self._under_way: set[int] = set()
        self._completed = 0
        self._closed = False
        self._reduced = False

    def ready(self, tensor: int) -> None:
        """A tensor's gradient exists. A tensor is ready at most once in a step."""
        group = self._group_of[tensor]
        self._missing[group] -= 1
        if self._missing[group] == 0 and not self._closed:
            heapq.heappush(self._queue, group)

    def close(self) -> None:
        """No more gradients in this step: missing ones count as ready."""
        if self._closed:
            return
        self._closed = True
        self._queue = list(range(self._started, self._num_backward))
        self._note_reduced()

    def gather(self, count: int | None = None) -> None:
        """Let the next ``count`` all-gathers of the plan go, or all that are left.

        Raises ``ValueError`` if those of an earlier step are still waiting or under way.
        """
        if not self._num_held:
            if self.gathering:
                raise ValueError("all-gathers of an earlier step have not completed")
            self._num_held = self._num_groups - self._num_backward
        first = self._num_groups - self._num_held
        last = self._num_groups if count is None else min(first + count, self._num_groups)
        self._gathers.extend(range(first, last))
        self._num_held = self._num_groups - last

    def start_next(self) -> int | None:
        """The group to start now, if there is one; it then counts as under way."""
        if len(self._under_way) + len(self._gathering) >= self._window:
            return None
        if self._gathers:
            group = self._gathers.popleft()
            self._gathering.add(group)
            return group
        if not self._queue:
            return None
        group = self._queue[0]
        if group != self._started:
            return None
        if not self._closed and (not self._overlap or group == self._num_backward - 1):
            return None
        heapq.heappop(self._queue)
        self._started += 1
        self._under_way.add(group)
        return group

    def completed(self, group: int) -> None:
        """A group that was started has arrived everywhere it must."""
        if group < self._num_backward:
            self._under_way.remove(group)
            self._completed += 1
        else:
            self._gathering.remove(group)
        self._note_reduced()

    def _note_reduced(self) -> None:
        if self._closed and self._completed == self._num_backward:
            # Gathers of the step before come first.
            self._reduced = self._reduced or not self.gathering

    @property
    def reduced(self) -> bool:
        """Whether the step is closed and all its groups of backward have completed."""
        return self._reduced

    @property
    def gathering(self) -> bool:
        """Whether all-gathers are held back, waiting or under way."""
        return bool(self._num_held or self._gathers or self._gathering)

    @property
    def done(self) -> bool:
        """Whether the step is closed and all its groups have completed."""
        return self._reduced and not self.gathering

    def gathered(self, tensor: int) -> bool:
        """Whether forward may use a tensor: no all-gather of it is still to come."""
        group = self._gather_of.get(tensor)
        if group is None:
            return True
        held = group >= self._num_groups - self._num_held
        return not held and group not in self._gathers and group not in self._gathering

    @property
    def num_started(self) -> int:
        """Groups of backward started in this step."""
        return self._started

    def missing(self) -> list[int]:
        """Number of tensors not yet ready, per group of backward."""
        return self._missing[: self._num_backward]

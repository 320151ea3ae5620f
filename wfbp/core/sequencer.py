"""Decides what is sent next: a pure state machine over the steps of a plan.

Events go in (a group is ready, the step closes, a group has completed); what to do comes out. The
runtime drives it with real events, the simulator with a virtual clock, so both take the same
decisions. No threads, no clock, no I/O.
"""

from __future__ import annotations

from wfbp.core.plan import Plan


class Sequencer:
    """Lets groups go in the plan's order, a few at a time.

    That order is the same on every rank, so ranks never start different collectives. Groups become
    ready in that order too: a complete group behind an incomplete one could not leave, so nobody
    announces it. The last group of backward carries what ranks tell each other of the step, so it
    goes only once the step is closed; without overlap all groups do.

    All-gathers become ready by :meth:`gather`, when the reduced shards have been used. They may
    last into the next step: :meth:`next_step` keeps them, and they go before all groups of the step
    that follows.

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
        >>> sequencer.ready(0); sequencer.start_next()
        0
        >>> sequencer.close(); sequencer.start_next() is None
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
        self._num_backward = plan.num_backward
        self._num_gathers = len(plan.groups) - plan.num_backward
        self.num_early = plan.num_backward - 1 if plan.overlap else 0
        """Groups of backward that may leave before the step is closed."""
        self.reset()

    def reset(self) -> None:
        """Begin a step, whatever became of the one before."""
        self._gathers_ready = self._gathers_started = self._gathers_completed = self._num_gathers
        self._begin()

    def next_step(self) -> None:
        """Begin the next step; all-gathers that have not completed go on.

        Raises ``ValueError`` if groups of backward have not completed.
        """
        if not self.reduced:
            raise ValueError("the next step cannot begin before all groups of backward completed")
        self._begin()

    def _begin(self) -> None:
        self.num_ready = self.num_started = self._completed = 0
        self._closed = False
        self.reduced = False
        """Whether the step is closed and all its groups of backward have completed."""

    def ready(self, group: int) -> None:
        """All gradients of a group of backward exist, and of those before it."""
        if not self._closed:
            self.num_ready = min(group + 1, self.num_early)

    def close(self) -> None:
        """No more gradients in this step: missing ones count as ready."""
        self._closed = True
        self.num_ready = self._num_backward

    def gather(self, count: int | None = None) -> None:
        """Let the next ``count`` all-gathers of the plan go, or all that are left.

        Raises ``ValueError`` if those of an earlier step are still waiting or under way.
        """
        if self._gathers_ready == self._num_gathers:
            if self.gathering:
                raise ValueError("all-gathers of an earlier step have not completed")
            self._gathers_ready = self._gathers_started = self._gathers_completed = 0
        left = self._num_gathers - self._gathers_ready
        self._gathers_ready += left if count is None else min(count, left)

    def start_next(self) -> int | None:
        """The group to start now, if there is one; it then counts as under way."""
        under_way = self.num_started - self._completed
        if under_way + self._gathers_started - self._gathers_completed >= self._window:
            return None
        if self._gathers_started < self._gathers_ready:
            self._gathers_started += 1
            return self._num_backward + self._gathers_started - 1
        if self.num_started < self.num_ready:
            self.num_started += 1
            return self.num_started - 1
        return None

    def completed(self, group: int) -> None:
        """A group that was started has arrived everywhere it must."""
        if group < self._num_backward:
            self._completed += 1
        else:
            self._gathers_completed += 1
        # Gathers of the step before come first; those that follow do not undo it.
        if self._completed == self._num_backward and self._gathers_completed == self._num_gathers:
            self.reduced = True

    @property
    def gathering(self) -> bool:
        """Whether all-gathers are held back, waiting or under way."""
        return self._gathers_completed < self._num_gathers

    @property
    def next_gather(self) -> int:
        """The first group that :meth:`gather` would let go now."""
        held = self._num_gathers - self._gathers_ready
        return self._num_backward + (self._gathers_ready if held else 0)

    @property
    def done(self) -> bool:
        """Whether the step is closed and all its groups have completed."""
        return self.reduced and not self.gathering

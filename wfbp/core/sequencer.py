"""Decides what is sent next: a pure state machine, driven by the runtime and by the simulator."""

from __future__ import annotations

from wfbp.core.plan import Plan


class Sequencer:
    """Releases groups in the plan's order, at most ``window`` at once. Not thread-safe.

    All ranks use this order, so they never start different collectives. Groups also become ready in
    this order. The last group of backward carries the ranks' messages about the step, so it is sent
    only after :meth:`close`; without overlap all groups are.

    :meth:`gather` makes all-gathers ready once the reduced shards have been used. All-gathers may
    last into the next step: :meth:`next_step` keeps them, and sends them before its own groups.
    """

    def __init__(self, plan: Plan, window: int = 1) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; expected at least 1")
        self._window = window  # 2 keep a link busy until the end of the first is noticed
        self._num_backward = plan.num_backward
        self._num_gathers = len(plan.groups) - plan.num_backward
        self._num_early = plan.num_early
        self._gathers_ready = self._gathers_started = self._gathers_completed = self._num_gathers
        self.reduced = True
        """Whether a closed step's groups of backward, and earlier all-gathers, have completed."""
        self.next_step()

    def next_step(self) -> None:
        """Begin the next step; unfinished all-gathers continue. Groups of backward must be done."""
        if not self.reduced:
            raise ValueError("the next step cannot begin before all groups of backward completed")
        self.num_ready = self.num_started = self._completed = 0
        self._closed = self.reduced = False

    def ready(self, group: int) -> None:
        """All gradients exist of a group of backward and of the groups before it."""
        if not self._closed:
            self.num_ready = min(group + 1, self._num_early)

    def close(self) -> None:
        """No more gradients in this step: missing ones count as ready."""
        self._closed = True
        self.num_ready = self._num_backward

    def gather(self, count: int | None = None) -> None:
        """Release the next ``count`` all-gathers, or all; those of older steps must be done."""
        if self._gathers_ready == self._num_gathers:
            if self.gathering:
                raise ValueError("all-gathers of an earlier step have not completed")
            self._gathers_ready = self._gathers_started = self._gathers_completed = 0
        left = self._num_gathers - self._gathers_ready
        self._gathers_ready += left if count is None else min(count, left)

    def start_next(self) -> int | None:
        """The group to start now, or None; it then counts as under way."""
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
        """The collective of a started group has completed on this rank."""
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
        """The first group that :meth:`gather` would release now."""
        held = self._num_gathers - self._gathers_ready
        return self._num_backward + (self._gathers_ready if held else 0)

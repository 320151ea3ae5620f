"""How often a gradient appears per step: learned from the steps before."""

from __future__ import annotations

_PATIENCE_STEPS = 8
"""So many steps in a row in which some gradient appears less often than expected are waited for."""


class AccumulationCounter:
    """Counts of one engine's tensors, by index. For the training thread.

    ``fired`` and ``expected`` are read, and the former counted up, where each gradient appears:
    without a call in between.

    Args:
        passes: what is expected at first.
        num_tensors: number of indices.
    """

    def __init__(self, passes: int, num_tensors: int) -> None:
        self.expected = [passes] * num_tensors
        """After so many a tensor is ready."""
        self.begin()
        self._rarer_steps = 0

    def begin(self) -> None:
        """A step begins."""
        self.fired = [0] * len(self.expected)
        """How often each gradient has appeared in the open step."""

    def learn(self) -> None:
        """Expect as many as were seen in this step: more at once, fewer after some such steps.

        Example:
            >>> passes = Passes(1, 2)
            >>> passes.fired = [3, 0]
            >>> passes.learn()
            >>> passes.expected
            [3, 1]
        """
        rarer = False
        for index, fired in enumerate(self.fired):
            if fired > self.expected[index]:
                self.expected[index] = fired
            elif 0 < fired < self.expected[index]:
                rarer = True
        self._rarer_steps = self._rarer_steps + 1 if rarer else 0
        if self._rarer_steps >= _PATIENCE_STEPS:
            self._rarer_steps = 0
            self.expected = [max(1, fired) for fired in self.fired]

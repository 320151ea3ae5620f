"""Whether iterations have come to take longer, or less, and stay that way."""

from __future__ import annotations

_NUM_WINDOWS = 5


class DriftDetector:
    """Compares each window of steps with the first one.

    Args:
        limit: relative change that counts; 0: none does.

    Example:
        >>> drift = Drift(0.25)
        >>> for window_s in (1.0, 1.1, 2.0, 2.0, 2.0, 2.0, 2.0):
        ...     drift.add(window_s)
        >>> drift.lasts
        True
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._baseline_s = 0.0
        self._num_drifted = 0

    def add(self, window_s: float) -> None:
        """The median iteration of a window."""
        self._baseline_s = self._baseline_s or window_s
        change = abs(window_s - self._baseline_s) / self._baseline_s
        self._num_drifted = self._num_drifted + 1 if 0 < self._limit < change else 0

    @property
    def has_drifted(self) -> bool:
        """Whether some windows in a row differed from the first."""
        return self._num_drifted >= _NUM_WINDOWS

"""A bell that wakes one thread."""

from __future__ import annotations

import threading
from contextlib import suppress


class AutoResetEvent:
    """Wakes whoever waits for it, or the next who will; rung twice it wakes once.

    Any thread may do anything. (``queue.SimpleQueue.get`` cannot serve here: where an item was
    taken by another thread and the timeout has passed by then, it waits for ever, in CPython
    3.11 at least; timeouts of some microseconds make that likely.)

    Example:
        >>> bell = Bell()
        >>> bell.ring()
        >>> bell.wait(1.0), bell.wait(0.001)
        (True, False)
    """

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def set(self) -> None:
        """Wake."""
        if self._silent.locked():
            with suppress(RuntimeError):  # another thread may ring at this moment
                self._silent.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it rings; False where it did not in time."""
        return self._silent.acquire(timeout=max(timeout_s, 0.0))

"""Postpones the program's signal handlers until an operation has ended.

Otherwise a handler's exception could end an operation such as ``step()`` in the middle on one rank
alone. Within :data:`deferred` the main thread only notes signals; their handlers run, and raise,
when the outermost block ends. A long wait runs overdue handlers; an exception from one ends the
runtime, because no operation can be resumed.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its getsignal() does not convert to enums
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ContextDecorator
from types import FrameType
from typing import Any

# Terminal and mpirun may both deliver one key press as SIGINT.
PATIENCE_S = 1.0
"""After this time a deferred signal is overdue, and a second SIGINT acts at once."""

_NUMBERS = sorted(
    int(number)
    for number in signal.valid_signals()
    if number not in (signal.SIGKILL, signal.SIGSTOP)
)

pending: dict[int, float] = {}
"""Signals whose handlers have yet to run, and when they arrived."""


class _Deferred(ContextDecorator):
    """Re-entrant context manager and decorator; does nothing outside of the main thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.handlers: dict[int, Callable[..., Any]] = {}  # the program's, while replaced

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self.depth += 1
        if self.depth > 1:
            return
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self.handlers[number] = handler
                    _signal.signal(number, _note)
        except BaseException:  # from a handler that was not replaced yet
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if self.depth > 1:
            self.depth -= 1
            return
        try:
            while self.handlers:
                number, handler = next(reversed(self.handlers.items()))
                if pending.pop(number, None) is not None:
                    handler(number, sys._getframe())
                if _signal.getsignal(number) is _note:  # else the operation has set another one
                    _signal.signal(number, handler)
                if number not in pending:
                    del self.handlers[number]
            self.depth = 0
        except BaseException:  # the other handlers run, too; the last exception propagates
            self.__exit__()
            raise


deferred = _Deferred()


def overdue(waiting_since: float) -> bool:
    """Whether a wait that began then (``time.monotonic``) must call :func:`run_pending`."""
    if not pending or threading.get_ident() != threading.main_thread().ident:
        return False
    return time.monotonic() - max(waiting_since, *pending.values()) > PATIENCE_S


def run_pending() -> None:
    """Run the handlers of pending signals, which may raise. No lock may be held."""
    while pending:
        number, _ = pending.popitem()
        deferred.handlers[number](number, sys._getframe())


def _note(number: int, frame: FrameType | None) -> None:
    since = pending.setdefault(number, time.monotonic())
    if number == signal.SIGINT and time.monotonic() - since > PATIENCE_S:
        del pending[number]
        deferred.handlers.get(number, signal.default_int_handler)(number, frame)

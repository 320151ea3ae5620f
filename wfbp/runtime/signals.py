"""Postpones the program's signal handlers until an operation has ended.

Python runs handlers in the main thread, between any two instructions, and their exceptions appear
there. An operation such as ``step()`` must not end in the middle on one rank alone. While the main
thread is within :data:`deferred`, signals are therefore only noted; their handlers run when the
outermost block ends, and their exceptions propagate from it.

A wait for ranks that do not come calls :func:`overdue` and :func:`run_pending`. An exception that
a handler raises there ends the runtime, because no operation can be resumed.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # its getsignal() does not convert to enums
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

PATIENCE_S = 1.0
"""A signal that has waited so long is overdue. A second SIGINT so much later is served at once;
an earlier one may be the same key press, delivered by the terminal and by mpirun."""

_NUMBERS = sorted(
    int(number)
    for number in signal.valid_signals()
    if number not in (getattr(signal, "SIGKILL", 0), getattr(signal, "SIGSTOP", 0))
)

pending: dict[int, float] = {}
"""Signals whose handlers have yet to run, and when they arrived."""


class _Deferred:
    """Re-entrant context manager; does nothing in other threads than the main thread."""

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

F = TypeVar("F", bound=Callable[..., Any])


def deferring(function: F) -> F:
    """Decorator: run a function within :data:`deferred`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with deferred:
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


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

"""Delays the program's signal handlers while an operation cannot be interrupted.

Python runs a handler between any two instructions of the main thread, and an error that it raises
appears there. During an operation of the main thread all Python handlers are therefore replaced by
one that only notes the signal. The program's own run where the operation waits and can be resumed
(the wait ends by :class:`HandlersDue`), else at its end. If other ranks do not come, they run after
``PATIENCE_S`` all the same; an error then ends the runtime.

Signals arrive in the main thread only: other threads are not affected.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without conversion to enums
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, TypeVar

PATIENCE_S = 1.0
"""How long a wait that cannot be taken up again is not left for the sake of a handler."""

INSIST_S = 1.0
"""A second interrupt from the keyboard so much later than the first is served on the spot."""

_NUMBERS = sorted(
    int(number)
    for number in signal.valid_signals()
    if number not in (getattr(signal, "SIGKILL", 0), getattr(signal, "SIGSTOP", 0))
)


class HandlersDue(BaseException):
    """A wait was left, and nothing is lost: call :func:`run_handlers`, and wait again."""


class _Nesting:
    """Counts how deep the main thread is in something; for ``with``."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += _in_main_thread()

    def __exit__(self, *_: object) -> None:
        self.depth -= _in_main_thread()


class _Postponed:
    """Within it the main thread runs none of the program's handlers but by the rules above."""

    def __enter__(self) -> None:
        if _in_main_thread() and not enter():
            _state.inner += 1

    def __exit__(self, *_: object) -> None:
        if _in_main_thread():
            if _state.inner:
                _state.inner -= 1
            else:
                leave()


class _State:
    """Of the main thread, which alone uses it."""

    def __init__(self) -> None:
        self.entered = False
        self.inner = 0
        self.handlers: list[Any] = []  # as they were found last, and the functions among them
        self.callables: list[tuple[int, Callable[..., Any]]] = []
        self.replaced: list[tuple[int, Callable[..., Any]]] = []
        self.noted: dict[int, float] = {}
        self.raised: BaseException | None = None


_state = _State()
noted = _state.noted
"""The signals that wait for their handlers, and since when; empty in most passes of a loop."""

uninterruptible = _Nesting()
"""Within it no wait is left before the operation has come to its end, or to ``PATIENCE_S``."""

postponed = _Postponed()


def enter() -> bool:
    """Begin an operation, which ends with :func:`leave`.

    Returns whether handlers were replaced for it: not in another thread, or within another
    operation.
    """
    if _state.entered or not _in_main_thread():
        return False
    _state.entered = True
    try:
        handlers = list(map(_signal.getsignal, _NUMBERS))
        if handlers != _state.handlers:
            handler_pairs = zip(_NUMBERS, handlers, strict=True)
            _state.handlers, _state.callables = (
                handlers,
                [pair for pair in handler_pairs if callable(pair[1])],
            )
        for pair in _state.callables:
            _state.replaced.append(pair)
            _signal.signal(pair[0], _note)
    except BaseException:  # a handler of those that are left, before anything has begun
        leave()
        raise
    return True


def leave() -> None:
    """End the operation, and run the handlers of pending signals, which may raise. Idempotent."""
    try:
        while _state.replaced:
            number, handler = _state.replaced[-1]
            if noted.pop(number, None) is not None:
                _call(number, handler)
            if _signal.getsignal(number) is _note:  # else the operation's own code has set another
                _signal.signal(number, handler)
            if number not in noted:
                _state.replaced.pop()
    except BaseException:
        leave()
        raise
    _state.entered = False


def serving() -> bool:
    """Whether the calling thread's handlers are postponed."""
    return _state.entered and _in_main_thread()


def due(resumable: bool, since: float) -> bool:
    """Whether a wait of the thread that is :func:`serving` must end so that handlers can run.

    ``resumable``: the wait can be resumed. ``since``: when it has begun (``time.monotonic``).
    """
    if not noted:
        return False
    if resumable:
        return True
    return time.monotonic() - max(since, *noted.values()) > PATIENCE_S


def run_handlers() -> None:
    """Run the handlers of pending signals, which may raise; see :func:`came_from_handler`.

    No lock may be held.
    """
    handlers = dict(_state.replaced)
    while noted:
        number, _ = noted.popitem()
        _call(number, handlers[number])


def came_from_handler(error: BaseException) -> bool:
    """Whether a handler has raised this, that was run last in a wait or at an operation's end."""
    return error is _state.raised


def forget_error() -> None:
    """Keep no longer what a handler has raised."""
    _state.raised = None


F = TypeVar("F", bound=Callable[..., Any])


def postponing(function: F) -> F:
    """Let a function run to its end before a handler's exception leaves it; for decorating."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with postponed:
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _call(number: int, handler: Callable[..., Any]) -> None:
    try:
        handler(number, sys._getframe(1))
    except BaseException as error:
        _state.raised = error
        raise


def _note(number: int, frame: FrameType | None) -> None:
    since = noted.setdefault(number, time.monotonic())
    if number == signal.SIGINT and time.monotonic() - since > INSIST_S:
        del noted[number]
        dict(_state.replaced).get(number, signal.default_int_handler)(number, frame)


_main_thread = main_thread().ident


def _note_main_thread() -> None:
    """In a forked process the thread that forked is the main thread."""
    global _main_thread
    _main_thread = get_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_main_thread)


def _in_main_thread() -> bool:
    return get_ident() == _main_thread

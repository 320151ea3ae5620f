"""When handlers of signals run, what comes out where, and that they are put back."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from wfbp.runtime import signals


class AlarmError(Exception):
    """What handlers raise."""


class Handler:
    """Notes calls; raises where it is told to."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.raises = False

    def __call__(self, number: int, frame: object) -> None:
        self.calls.append(number)
        if self.raises:
            raise AlarmError(number)


@pytest.fixture
def handler() -> Iterator[Handler]:
    found = Handler()
    previous = {n: signal.signal(n, found) for n in (signal.SIGUSR1, signal.SIGUSR2)}
    yield found
    for number, old in previous.items():
        signal.signal(number, old)
    assert not signals.pending
    assert not signals.deferred.depth


def test_handlers_run_at_the_end(handler: Handler) -> None:
    with signals.deferred:
        signal.raise_signal(signal.SIGUSR1)
        with signals.deferred:
            signal.raise_signal(signal.SIGUSR2)
        assert handler.calls == []
    assert sorted(handler.calls) == [signal.SIGUSR1, signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.raise_signal(signal.SIGUSR1)
    assert len(handler.calls) == 3


def test_all_handlers_run_and_are_put_back_where_one_raises(handler: Handler) -> None:
    handler.raises = True

    @signals.deferred
    def operation() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)

    with pytest.raises(AlarmError):
        operation()
    assert sorted(handler.calls) == [signal.SIGUSR1, signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is handler


def test_long_waits_run_handlers_that_are_overdue(handler: Handler, monkeypatch: Any) -> None:
    now = 10.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    with signals.deferred:
        assert not signals.overdue(0.0)
        signal.raise_signal(signal.SIGUSR1)
        assert not signals.overdue(0.0)
        now += 1.01
        assert signals.overdue(0.0)
        assert not signals.overdue(10.5)  # a wait that has just begun goes on
        signals.run_pending()
        assert handler.calls == [signal.SIGUSR1]
        assert not signals.overdue(0.0)


def test_a_handler_may_begin_an_operation(handler: Handler) -> None:
    def nested(number: int, frame: object) -> None:
        with signals.deferred:
            handler(number, frame)

    signal.signal(signal.SIGUSR1, nested)
    with signals.deferred:
        signal.raise_signal(signal.SIGUSR1)
    assert handler.calls == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is nested


def test_a_handler_that_is_set_within_stays(handler: Handler) -> None:
    other = Handler()
    with signals.deferred:
        signal.signal(signal.SIGUSR1, other)
    assert signal.getsignal(signal.SIGUSR1) is other


def test_an_insistent_interrupt_is_served_on_the_spot(monkeypatch: Any) -> None:
    now = 10.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    @signals.deferred
    def operation() -> None:
        nonlocal now
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        now += 1.01
        signal.raise_signal(signal.SIGINT)
        pytest.fail("nobody was interrupted")

    try:
        with pytest.raises(KeyboardInterrupt):
            operation()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_have_none(handler: Handler) -> None:
    found: list[object] = []

    def act() -> None:
        with signals.deferred:
            found.extend([signals.deferred.depth, signal.getsignal(signal.SIGUSR1)])

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert found == [0, handler]

"""Exchanges: what is announced, what is waited for, and what must never be mixed up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

from wfbp.core.types import Op, TensorSpec
from wfbp.errors import WfbpError
from wfbp.jax.gradient_exchange import ExchangeDescription, GradientExchange
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.step import BufferView

SPECS = tuple(TensorSpec(name, (4,), "float32") for name in "abc")
OUTPUTS = [5000, 5001, 5002]
REQUEST = ExchangeDescription(SPECS, ReducerOptions("auto", 100, name="test"))


class RecordingEngine:
    """Takes down what it is told."""

    def __init__(self) -> None:
        self.marked: list[tuple[int, int]] = []
        self.left: list[BufferView | None] = [None, None, None]
        self.copied: list[tuple[Sequence[int], ...]] = []
        self.during_step: Any = lambda: None
        self.num_installed = 1
        self.early_groups = [0, -1, 0]
        self.expected: list[Sequence[int]] = []

    def mark_ready(
        self, index: int, address: int, owner: object, time_s: float | None = None
    ) -> None:
        self.marked.append((index, address))

    def synchronize(self, targets: Sequence[int]) -> list[BufferView | None]:
        assert targets == OUTPUTS
        self.during_step()
        return self.left

    def copy(self, *args: Sequence[int]) -> None:
        self.copied.append(args)


def made(engine: RecordingEngine) -> GradientExchange:
    return GradientExchange(
        REQUEST,
        "rank 0 of 2",
        threading.Lock(),
        lambda: engine,  # type: ignore[arg-type,return-value]
        engine.copy,
        engine.expected.append,
    )


def announce(exchange: GradientExchange, *indices: int, base: int = 1000) -> None:
    for index in indices:
        exchange.announce(index, base + index)


def after_one_step(engine: RecordingEngine) -> GradientExchange:
    """An exchange that has made its engine."""
    exchange = made(engine)
    exchange.reduce([1000, 1001, 1002], OUTPUTS)
    engine.marked.clear()
    return exchange


def test_what_the_engine_left_in_its_own_memory_is_copied_from_there() -> None:
    engine = RecordingEngine()
    exchange = made(engine)
    data = np.zeros(16, np.uint8)
    slot = BufferView(data, data.ctypes.data)
    for left in ([None, None, None], [None, slot, slot]):
        engine.left = left
        announce(exchange, 0, 1, 2)
        exchange.reduce([1000, 1001, 1002], OUTPUTS)
    assert engine.copied == [((5001, 5002), (slot.address, slot.address), (16, 16))]


def test_what_may_leave_early_is_told_with_every_plan() -> None:
    engine = RecordingEngine()
    exchange = made(engine)
    for plan, told in ((1, 1), (1, 1), (2, 2), (2, 2)):
        engine.num_installed = plan
        announce(exchange, 0, 1, 2)
        exchange.reduce([1000, 1001, 1002], OUTPUTS)
        assert engine.expected == [[0, -1, 0]] * told
    engine.early_groups = [-1, -1, -1]
    engine.num_installed = 3
    announce(exchange, 0, 1, 2)
    exchange.reduce([1000, 1001, 1002], OUTPUTS)
    assert engine.expected[-1] == [-1, -1, -1]


def test_a_gradient_that_moved_is_announced_again_where_it_is() -> None:
    engine = RecordingEngine()
    exchange = after_one_step(engine)
    announce(exchange, 0, 1, 2)
    engine.during_step = lambda: sources.append(exchange.source(1))
    sources: list[Any] = []
    exchange.reduce([1000, 7777, 1002], OUTPUTS)
    assert engine.marked[3:] == [(1, 7777)]
    assert sources == [(7777, None)]


def test_a_gradient_that_was_not_announced_is_taken_from_the_wait() -> None:
    engine = RecordingEngine()
    exchange = after_one_step(engine)
    announce(exchange, 2)
    exchange.reduce([1000, 1001, 1002], OUTPUTS)
    assert engine.marked == [(2, 1002), (0, 1000), (1, 1001)]
    assert exchange.source(0) is None, "the next step is open"


def test_two_announcements_in_one_step_fail_it_and_all_later_ones() -> None:
    engine = RecordingEngine()
    exchange = made(engine)
    announce(exchange, 0, 1, 2, 1)
    for _ in range(2):
        with pytest.raises(WfbpError, match=r"rank 0 of 2: test: the gradient of b .* two steps"):
            exchange.reduce([1000, 1001, 1002], OUTPUTS)
        with pytest.raises(WfbpError, match=r"earlier step failed .*shutdown\(\) and .*init\(\)"):
            exchange.reduce([1000, 1001, 1002], OUTPUTS)
    assert engine.marked == []


def test_two_waits_at_once_fail_both() -> None:
    engine = RecordingEngine()
    exchange = made(engine)
    second: list[str] = []

    def wait_too() -> None:
        with pytest.raises(WfbpError, match="two steps end at once") as caught:
            exchange.reduce([1000, 1001, 1002], OUTPUTS)
        second.append(str(caught.value))

    engine.during_step = wait_too
    announce(exchange, 0, 1, 2)
    with pytest.raises(WfbpError, match="two steps end at once"):
        exchange.reduce([1000, 1001, 1002], OUTPUTS)
    assert len(second) == 1


def test_what_ends_one_step_ends_all() -> None:
    engine = RecordingEngine()
    exchange = made(engine)

    def fail() -> None:
        raise WfbpError("rank 1 failed")

    engine.during_step = fail
    announce(exchange, 0, 1, 2)
    for _ in range(2):
        with pytest.raises(WfbpError, match="rank 1 failed"):
            exchange.reduce([1000, 1001, 1002], OUTPUTS)
        engine.during_step = lambda: None


def test_requests_are_the_same_in_every_process() -> None:
    """Their keys are in compiled programs, which may be kept on disk."""
    assert REQUEST.key == 1082383313162382877
    others = [
        ExchangeDescription(SPECS, ReducerOptions("auto", 100, name="other")),
        ExchangeDescription(SPECS[:2], ReducerOptions("auto", 100, name="test")),
        ExchangeDescription(SPECS, ReducerOptions("auto", 100, Op.SUM, name="test")),
        ExchangeDescription(SPECS, ReducerOptions("layerwise", 100, name="test")),
        ExchangeDescription(SPECS, ReducerOptions("auto", 101, name="test")),
        ExchangeDescription(SPECS, REQUEST.options, occurrence=1),
    ]
    assert len({r.key for r in (REQUEST, *others)}) == 7
    assert all(0 <= r.key < 2**63 for r in others)
    assert others[-1].title == "test (2)"


def test_an_announcement_while_the_step_ends_fails_it() -> None:
    engine = RecordingEngine()
    exchange = made(engine)
    engine.during_step = lambda: announce(exchange, 0, base=5000)
    announce(exchange, 0, 1, 2)
    with pytest.raises(WfbpError, match="the gradient of a was announced again"):
        exchange.reduce([1000, 1001, 1002], OUTPUTS)

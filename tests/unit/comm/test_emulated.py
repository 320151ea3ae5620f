"""The emulated link: times on one serial channel, and data as from equal ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import wfbp
from tests.support import emulated_link as emulated
from tests.support.emulated_link import EmulatedLink
from wfbp.comm.waiting import wait
from wfbp.config import Config
from wfbp.core.types import Op
from wfbp.errors import PeerError
from wfbp.runtime.named import named_lane
from wfbp.runtime.named.coordinator import Coordinator


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(emulated, "time", clock)
    return clock


def cost(nbytes: int) -> float:
    return 1.0 + nbytes


def test_messages_follow_one_another_without_a_gap(clock: Clock) -> None:
    link = EmulatedLink(cost)
    works = [link.all_reduce(np.zeros(n, np.uint8), "uint8", Op.AVERAGE) for n in (3, 0, 5)]
    ends_s = (104.0, 105.0, 111.0)
    for work, end_s in zip(works, ends_s, strict=True):
        clock.now_s = end_s - 1e-2
        assert not work.test()
        clock.now_s = end_s
        assert work.test()


def test_a_free_channel_starts_at_once(clock: Clock) -> None:
    link = EmulatedLink(cost)
    link.broadcast(np.zeros(1, np.uint8), 0)
    clock.now_s = 150.0
    work = link.broadcast(np.zeros(1, np.uint8), 0)
    clock.now_s = 151.9
    assert not work.test()
    clock.now_s = 152.0
    assert work.test()


def test_close_to_the_end_the_rest_is_slept(clock: Clock) -> None:
    work = EmulatedLink(cost).all_gather_bytes(b"")
    clock.now_s = 101.0 - 1e-4
    assert work.test()
    assert clock.now_s == pytest.approx(101.0)


def test_duplicates_share_the_channel(clock: Clock) -> None:
    link = EmulatedLink(cost)
    other = link.duplicate()
    link.all_gather_bytes(b"12")
    work = other.all_gather_bytes(b"")
    clock.now_s = 103.5
    assert not work.test()
    clock.now_s = 104.0
    assert work.test()
    assert link.activity == other.activity == 1


@pytest.mark.parametrize(
    ("op", "want"), [(Op.SUM, 6), (Op.AVERAGE, 2), (Op.MIN, 2), (Op.MAX, 2), (Op.PRODUCT, 8)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_equal_ranks(op: Op, want: int, dtype: str) -> None:
    data = np.full(3, 2, dtype)
    wait(EmulatedLink(lambda _: 0.0, size=3).all_reduce(data, dtype, op))
    assert data.tolist() == [want] * 3


def test_gathers_its_own_parts() -> None:
    link = EmulatedLink(lambda _: 0.0, size=3)
    assert wait(link.all_gather_bytes(b"me")) == [b"me"] * 3
    data = np.array([1, 2, 0, 0, 0, 0], np.uint8)
    wait(link.all_gather(data, [2, 1, 3]))
    assert data.tolist() == [1, 2, 1, 1, 2, 1]


@pytest.mark.parametrize("numel", [1, 1000])
def test_named_operations(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided without the ranks that are played: small data and large."""
    monkeypatch.setattr(named_lane, "Coordinator", lambda size: Coordinator(1))
    wfbp.init(backend=EmulatedLink(lambda _: 0.0, size=3), config=Config(timeout_s=60.0))
    try:
        total = wfbp.allreduce(np.full(numel, 2.0), op=wfbp.Sum)
        assert total.tolist() == [6.0] * numel
    finally:
        wfbp.shutdown()


def test_an_abort_ends_what_is_pending() -> None:
    link = EmulatedLink(lambda _: 60.0)
    work = link.broadcast(np.zeros(1, np.uint8), 0)
    link.abort(3)
    with pytest.raises(PeerError, match="code 3"):
        work.test()


def test_waiting_takes_no_core() -> None:
    """It sleeps between most looks; 0.3 s have room for some hundred thousand."""
    work: Any = EmulatedLink(lambda _: 0.3).all_gather_bytes(b"")
    looks: list[int] = []
    test = work.test
    work.test = lambda: (looks.append(1), test())[1]
    wait(work)
    assert 0 < len(looks) < 20_000

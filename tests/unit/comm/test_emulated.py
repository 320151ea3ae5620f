"""The emulated link: times on one serial channel, and data as from equal ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import emulated_link as emulated
from tests.support.emulated_link import EmulatedLink
from wfbp.comm.waiting import wait
from wfbp.core.types import Op


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


@pytest.mark.parametrize(
    ("op", "want"), [(Op.SUM, 6), (Op.AVERAGE, 2), (Op.MIN, 2), (Op.MAX, 2), (Op.PRODUCT, 8)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_equal_ranks(op: Op, want: int, dtype: str) -> None:
    data = np.full(3, 2, dtype)
    wait(EmulatedLink(lambda _: 0.0, size=3).all_reduce(data, dtype, op))
    assert data.tolist() == [want] * 3

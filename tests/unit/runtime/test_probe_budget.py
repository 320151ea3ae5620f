"""Measuring the network ends in time, also where messages take long."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.emulated_link import EmulatedLink
from tests.support.local import LocalWorld
from tests.unit.runtime.test_network import Known
from wfbp.comm import cost_probe
from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Finished
from wfbp.comm.cost_probe import measure_cost, measure_kappa, probe_sizes
from wfbp.core.cost import LinearCost
from wfbp.core.fit import MAX_KAPPA

REDUCE = (cost_probe.Operation.ALL_REDUCE,)


class CountingLink(EmulatedLink):
    """Counts messages."""

    num_messages = 0

    def all_reduce(self, *arguments: object, **options: object) -> object:
        self.num_messages += 1
        return super().all_reduce(*arguments, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha_s", [5e-3, 30e-3])
def test_slow_messages_are_few(alpha_s: float) -> None:
    """As where ranks outnumber cores and each message waits for its turn."""
    link = CountingLink(LinearCost(alpha_s, 1e-9))
    points = measure_cost(link, 1 << 20, budget_s=0.2)
    sizes = probe_sizes(1 << 20)
    assert [points[0][0], points[-1][0]] == [sizes[0], sizes[-1]]
    assert all(seconds >= alpha_s / 2 for _, seconds in points)
    # Within the budget, and in any case: two messages before the first size, and two for each
    # size that is begun within the budget, and for the largest.
    begun = 2 * (len(points) + 1)
    assert link.num_messages <= 0.2 / alpha_s * cost_probe.WINDOW + begun
    assert len(points) < len(sizes)
    assert list(points) == sorted(points)


def test_where_nothing_is_allowed_two_sizes_are_measured() -> None:
    points = measure_cost(LocalWorld(1).backend(0), 1 << 20, budget_s=0.0)
    assert [size for size, _ in points] == [4, 1 << 20]


class MarkedMemory(EmulatedLink):
    """Memory is full of ones until it is written to."""

    def zeros(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.ones(nbytes, np.uint8)

    def all_reduce(self, buffer: Buffer, *arguments: Any, **options: Any) -> Any:
        assert not buffer.any(), "sent memory that was not touched before"
        return super().all_reduce(buffer, *arguments, **options)


def test_no_message_pays_for_the_first_touch_of_memory() -> None:
    """It takes longer than sending on a fast network, and the largest size may be sent once."""
    cost = LinearCost(1e-6, 1e-12)
    measure_cost(MarkedMemory(cost), 20 << 20, budget_s=0.0)
    measure_kappa(MarkedMemory(cost), 1 << 20, cost, budget_s=0.0)


def test_small_models_are_worth_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []

    def measure(backend: object, *, budget_s: float, **_: object) -> list[tuple[int, float]]:
        budgets.append(budget_s)
        return [(4, 1e-5), (1024, 2e-5)]

    monkeypatch.setattr("wfbp.runtime.tuning.network.measure_cost", measure)
    for max_bytes in (1 << 16, 4 << 20, 1 << 30):
        Known().ask(max_bytes, REDUCE, False, None)
    assert budgets[0] < budgets[1] < budgets[2]
    assert budgets[2] <= 1.0  # what Known allows
    Known().ask(1 << 30, tuple(cost_probe.Operation), False, None)
    assert len(budgets[3:]) == 3
    assert sum(budgets[3:]) <= 1.0, "all that is missing shares it"


class Busy(CountingLink):
    """Each message takes 2 ms, and so many seconds of this thread's processor time."""

    def __init__(self, busy_s: float) -> None:
        super().__init__(LinearCost(2e-3, 0.0))
        self.busy_s = busy_s

    def all_reduce(self, *arguments: object, **options: object) -> object:
        until_s = time.thread_time() + self.busy_s
        while time.thread_time() < until_s:
            pass
        return super().all_reduce(*arguments, **options)


SLOW = LinearCost(2e-3, 0.0)


def test_messages_slow_down_compute_by_their_processor_time() -> None:
    assert measure_kappa(Busy(2e-3), 1 << 12, SLOW) == MAX_KAPPA
    assert measure_kappa(Busy(1e-3), 1 << 12, SLOW) >= 0.99  # half of the time, and its own work


def test_one_core_of_several_is_a_part() -> None:
    """All of an eighth: s / (1 - s) = 1/7."""
    assert measure_kappa(Busy(2e-3), 1 << 12, SLOW, 1 / 8) == pytest.approx(1 / 7)
    assert measure_kappa(Busy(2e-3), 1 << 12, SLOW, 0.0) == 0.0


def test_on_a_slow_network_small_messages_are_measured() -> None:
    link = Busy(0.0)
    sizes: list[int] = []
    link.all_reduce = lambda data, *_: sizes.append(data.nbytes) or Finished(None)  # type: ignore[assignment]
    measure_kappa(link, 1 << 30, LinearCost(0.0, 1e-6), budget_s=0.05)
    (size,) = set(sizes)
    assert 12 * size * 1e-6 <= 0.05 < 12 * 4 * size * 1e-6

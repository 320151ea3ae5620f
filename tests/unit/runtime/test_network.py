"""What is measured of the network, how far, and when again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.local import LocalBackend, LocalWorld
from wfbp.comm.backend import Backend, Work
from wfbp.comm.device.device_backend import DeviceBackend
from wfbp.comm.waiting import wait
from wfbp.core.cost import Costs
from wfbp.core.types import Operation
from wfbp.runtime.tuning import network
from wfbp.runtime.tuning.network import NetworkCosts

MIB = 2**20
REDUCE = (Operation.ALL_REDUCE,)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Operation, int]]:
    """The operation and the largest size of each measurement. A byte takes a nanosecond."""
    found: list[tuple[Operation, int]] = []

    def measure(
        backend: Backend, *, max_bytes: int, operation: Operation, **_: Any
    ) -> list[tuple[int, float]]:
        found.append((operation, max_bytes))
        return [(size, 1e-5 + size * 1e-9) for size in (4, max_bytes // 4, max_bytes)]

    def kappa(
        backend: Backend, max_bytes: int, curve: Callable[[float], float], part: float, **_: Any
    ) -> float:
        assert curve(max_bytes) == pytest.approx(1e-5 + max_bytes * 1e-9, rel=1e-3)
        return 2.0 * part

    monkeypatch.setattr(network, "measure_cost", measure)
    monkeypatch.setattr(network, "measure_kappa", kappa)
    return found


class Known(NetworkCosts):
    """Of one rank, which has no time limit."""

    def __init__(self) -> None:
        super().__init__(1.0, lambda label, s: None)

    def ask(
        self,
        max_bytes: int,
        operations: Sequence[Operation],
        anew: bool,
        lane_backend: Backend | None,
    ) -> Costs:
        backend = LocalWorld(1).backend(0)
        return self.measure(
            max_bytes, operations, anew, lane_backend, lambda start, _: start(backend).result
        )


def test_large_messages_cost_in_proportion(measured: list[tuple[Operation, int]]) -> None:
    known = Known()
    found = known.ask(500 * MIB, REDUCE, False, None)
    assert measured == [(Operation.ALL_REDUCE, 16 * MIB)]
    for nbytes in (16 * MIB, 100 * MIB, 500 * MIB):
        assert found.all_reduce(nbytes) == pytest.approx(1e-5 + nbytes * 1e-9)


def test_what_is_known_is_not_measured_again(measured: list[tuple[Operation, int]]) -> None:
    known = Known()
    known.ask(1000, REDUCE, False, None)
    known.ask(900, REDUCE, False, None)
    assert measured == [(Operation.ALL_REDUCE, 1000)]
    for _ in range(2):
        known.ask(17 * MIB, REDUCE, False, None)
        known.ask(99 * MIB, REDUCE, False, None)
    assert measured[1:] == [(Operation.ALL_REDUCE, 16 * MIB)]
    known.ask(99 * MIB, tuple(Operation), False, None)
    assert {operation for operation, _ in measured[2:]} == {
        Operation.REDUCE_SCATTER,
        Operation.ALL_GATHER,
    }
    whole = known.ask(99 * MIB, REDUCE, False, None)
    assert whole.reduce_scatter is not None, "what is known is told, asked for or not"
    anew = known.ask(99 * MIB, REDUCE, True, None)
    assert len(measured) == 5
    assert anew.reduce_scatter is None, "it may be as wrong as what was measured with it"


def on_device(free_bytes: int) -> Any:
    lane_backend = Mock(spec=DeviceBackend, device=Mock())
    lane_backend.device.free_bytes.return_value = free_bytes
    lane_backend.probe_limit = lambda: DeviceBackend.probe_limit(lane_backend)
    return lane_backend


@pytest.mark.parametrize(
    ("asked", "free", "largest"),
    [(99, 4000, 99), (500, 4000, 128), (500, 300, 75), (500, 10, 16)],
)
def test_a_device_is_measured_further_where_it_has_room(
    measured: list[tuple[Operation, int]], asked: int, free: int, largest: int
) -> None:
    known, lane_backend = Known(), on_device(free * MIB)
    known.ask(asked * MIB, REDUCE, False, None)
    for _ in range(2):
        known.ask(asked * MIB, REDUCE, False, lane_backend)
    assert [nbytes for _, nbytes in measured] == [16 * MIB, largest * MIB]
    lane_backend.trim.assert_called_once()


def test_the_fullest_device_decides(measured: list[tuple[Operation, int]]) -> None:
    carriers = [on_device(free * MIB) for free in (4000, 200)]
    ranks = LocalWorld(2)

    def ask(rank: int) -> None:
        def call(start: Callable[[Backend], Work[Any]], label: str) -> Any:
            return wait(start(ranks.backend(rank)), timeout_s=60.0)

        known = NetworkCosts(1.0, lambda label, s: None)
        known.measure(99 * MIB, REDUCE, False, carriers[rank], call)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ask, range(2)))
    assert [nbytes for _, nbytes in measured] == [50 * MIB] * 2


def test_a_group_costs_more_than_its_message_over_a_network(
    measured: list[tuple[Operation, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory = Known().ask(MIB, REDUCE, False, None).all_reduce
    monkeypatch.setattr(LocalBackend, "progresses_alone", True)
    over_network = Known().ask(MIB, REDUCE, False, None).all_reduce
    for nbytes in (0, 1000, MIB, 2 * MIB):
        assert over_network(nbytes) == pytest.approx(in_memory(nbytes) + 2e-4)
    half = Known().ask(MIB, [Operation.REDUCE_SCATTER], False, None).reduce_scatter
    assert half is not None
    assert half(MIB) == pytest.approx(in_memory(MIB) + 1e-4)


def test_a_device_computes_without_this_core(measured: list[tuple[Operation, int]]) -> None:
    assert Known().ask(MIB, REDUCE, False, on_device(4000)).kappa == 0.0

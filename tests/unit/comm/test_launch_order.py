"""The order of launches: that of rank 0, whatever becomes ready first elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np

from tests.support.local import LocalWorld
from tests.support.software_device import SoftwareDevice
from wfbp.comm.device.device_backend import DeviceBackend, DeviceWork
from wfbp.comm.device.launch_order import LaunchOrder
from wfbp.core.types import Op


class Works(DeviceBackend):
    """A lane's backend, whose collectives only note that they were launched."""

    def __init__(self, host: Any, name: str, launched: list[str]) -> None:
        super().__init__(SoftwareDevice(), host)
        self.name, self.launched = name, launched

    def _all_reduce(self, work: DeviceWork, dtype: str, op: Op) -> None:
        self.launched.append(self.name[0])
        work.conclude()

    _reduce_scatter = _all_gather = check = give_up = close = Mock()


class Rank:
    """Lanes of one rank, and what they have launched."""

    def __init__(
        self,
        rank: int,
        others: list[Rank],  # which hear of rank 0's turns
        advance_others: Callable[[], None] = lambda: None,
    ) -> None:
        self.order = LaunchOrder(
            rank,
            lambda turns: [other.order.hear(turns) for other in others if other is not self],
            lambda: advance_others(),
        )
        self.launched: list[str] = []
        self._lanes: dict[str, Works] = {}

    def admit(self, name: str, host: Any) -> None:
        lane = self._lanes[name] = Works(host, name, self.launched)
        lane.lane = self.order.admit(host, timeout_s=60.0)
        lane.order = self.order

    def launch(self, name: str) -> DeviceWork:
        return self._lanes[name].all_reduce(np.zeros(8, np.uint8), "uint8", Op.SUM)


def done(work: DeviceWork) -> bool:
    """Whether it ends soon, without a wait for others within the call."""
    while work.issued():
        if work.test():
            return True
    return False


def pair(*names: str) -> list[Rank]:
    """Two ranks with lanes of these names."""
    ranks: list[Rank] = []
    ranks += [Rank(0, ranks), Rank(1, ranks)]
    admit_on_both(ranks, *names)
    return ranks


def admit_on_both(ranks: list[Rank], *names: str) -> None:
    for name in names:
        hosts = LocalWorld(2)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda r, h=hosts, n=name: ranks[r].admit(n, h.backend(r)), range(2)))


def test_a_single_lane_is_not_held_up() -> None:
    _, second = pair("a")
    assert second.launch("a").issued()
    assert second.launched == ["a"]


def test_rank_0_decides() -> None:
    first, second = pair("a", "b", "c")
    works = [second.launch(name) for name in "ccba"]
    assert [work.nbytes for work in works] == [8] * 4
    assert not any(work.issued() for work in works)
    for name in "acbc":
        first.launch(name)
    assert all(done(work) for work in works)
    assert second.launched == first.launched == ["a", "c", "b", "c"]


def test_what_has_its_turn_is_waited_for() -> None:
    first, second = pair("a", "b")
    for name in "ab":
        first.launch(name)
    early = second.launch("b")
    assert not early.issued()
    assert second.launch("a").issued()
    assert early.issued()
    assert second.launched == first.launched == ["a", "b"]


def test_who_waits_within_a_call_lets_other_lanes_come_to_their_turn() -> None:
    late: list[DeviceWork] = []
    ranks: list[Rank] = []

    def advance_others() -> None:
        if not late:
            late.append(ranks[1].launch("b"))

    ranks += [Rank(0, ranks), Rank(1, ranks, advance_others)]
    admit_on_both(ranks, "a", "b")
    for name in "ba":
        ranks[0].launch(name)
    work = ranks[1].launch("a")
    assert not work.issued()
    assert not work.test()
    assert done(work)
    assert ranks[1].launched == ["b", "a"]


def test_what_was_launched_before_there_was_an_order_comes_first() -> None:
    """One rank is ahead with the first lane when the second one is made."""
    ranks = pair("a")
    for _ in range(2):
        ranks[1].launch("a")
    admit_on_both(ranks, "b")
    first, second = ranks
    assert not first.launch("b").issued()
    assert not second.launch("b").issued()
    ahead = second.launch("a")
    assert first.launch("a").issued()
    assert first.launched == ["a"], "the other rank had launched two of these"
    first.launch("a")
    assert first.launched == ["a", "a", "b"]
    assert not ahead.issued()
    assert second.launched == ["a", "a", "b"]
    first.launch("a")
    assert ahead.issued()
    assert first.launched == second.launched == ["a", "a", "b", "a"]

"""Averages have the same bits by every schedule, interface and size, and however they travel."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parallel.runs import JOB_S, outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

MESSAGES = (("WFBP_SHARED_MEMORY", "0"),)
IN_ORDER = (("WFBP_REPRODUCIBLE", "1"),)


def bits(
    ranks: int,
    mpi: str = "mpich",
    env: tuple[tuple[str, str], ...] = (),
    hosts: tuple[int, ...] = (),
) -> Any:
    """The digests of a job, which are those of each rank."""
    layout = json.dumps(list(hosts))
    found = outcome(
        "torch/identical_bits",
        ranks,
        layout,
        mpi=mpi,
        env=env,
        timeout=JOB_S,
        preloaded="torch and jax",
    )
    assert found.run.rc == 0, found.run
    assert all(told == found.ranks[0] for told in found.ranks), found.ranks
    digests = found.ranks[0]
    for kind, number in (("parameters", 12), ("averages", 8)):
        assert len(digests[kind]) == number
        assert len(set(digests[kind].values())) == 1, digests[kind]
    return digests


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 5))])
def test_schedules_and_ways(ranks: int) -> None:
    assert bits(ranks) == bits(ranks, env=MESSAGES)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 5])
def test_mpi_libraries(ranks: int) -> None:
    assert bits(ranks, "openmpi") == bits(ranks)


@pytest.mark.long
def test_eight_ranks() -> None:
    assert bits(8) == bits(8, env=MESSAGES)


def test_hosts_with_several_ranks() -> None:
    """They add in another order, which is the same for every schedule."""
    apart = bits(3, hosts=(1, 2))
    assert apart["parameters"] != bits(3)["parameters"]


@pytest.mark.long
def test_hosts_that_add_in_order() -> None:
    assert bits(3, env=IN_ORDER, hosts=(1, 2)) == bits(3)

"""Encoded gradients: every rank gets the same bits, by every plan, as the reference in NumPy."""

from __future__ import annotations

import json

import pytest

from tests.parallel.runs import JOB_S, outcome
from wfbp.config import SCHEDULES

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]


def check(ranks: int, hosts: tuple[int, ...] = (), mpi: str = "mpich", codec: str = "int8") -> None:
    found = outcome(
        "torch/codecs",
        ranks,
        json.dumps(list(hosts)),
        codec,
        mpi=mpi,
        timeout=JOB_S,
        preloaded="torch and jax",
    )
    assert found.run.rc == 0, found.run
    assert all(told == found.ranks[0] for told in found.ranks), found.ranks
    for optimizer in ("adam", "momentum"):
        digests = found.ranks[0][optimizer]
        assert set(digests) == set(SCHEDULES)
        assert len(set(digests.values())) == 1, digests
    averages = found.ranks[0]["averages"]
    assert len(set(averages.values())) == 1, averages
    exact = set(found.ranks[0]["exact averages"].values())
    assert len(exact | set(averages.values())) == 2, (exact, averages)
    assert not any(found.ranks[0]["differ"].values()), found.ranks[0]["differ"]
    if codec != "int8":
        return
    for _, phase, known, _ in found.ranks[0]["chosen"].values():
        assert (phase, known) == ("installed", True), found.ranks[0]["chosen"]
    assert found.ranks[0]["mixed"]["layerwise"][1] == ["bfloat16", "float32", "int8"]
    guarded = found.ranks[0]["guarded"]
    assert guarded["warn"][:2] == guarded["off"][:2], "samples change nothing"
    assert guarded["warn"][1] == ["float32", "int8"]
    assert guarded["warn"][2] > 0.99
    assert guarded["fallback"][1] == ["bfloat16"]
    assert guarded["off"][2] is None
    errors = found.ranks[0]["after a spike"]
    assert max(errors.values()) < 0.1, errors
    # 30 without feedback. A factor is usual from the fifth step on.
    assert max(found.ranks[0]["made up"].values()) < 5, found.ranks[0]["made up"]


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4, 5))]
)
def test_one_rank_per_host(ranks: int) -> None:
    check(ranks)


@pytest.mark.parametrize("hosts", [(), pytest.param((2, 1), marks=pytest.mark.long)])
def test_int4(hosts: tuple[int, ...]) -> None:
    check(3, hosts, codec="int4")


@pytest.mark.parametrize("hosts", [(2, 1), pytest.param((2, 2), marks=pytest.mark.long)])
def test_several_ranks_per_host(hosts: tuple[int, ...]) -> None:
    check(sum(hosts), hosts)


@pytest.mark.long
@pytest.mark.parametrize("hosts", [(), (1, 2)])
def test_open_mpi(hosts: tuple[int, ...]) -> None:
    check(3, hosts, "openmpi")

"""Local steps: as calculated in one process, with the same common parameters on every rank."""

from __future__ import annotations

import pytest

from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]


ON_OPEN_MPI = pytest.param(3, "openmpi", marks=pytest.mark.long)


@pytest.mark.parametrize(("ranks", "mpi"), [(1, "mpich"), (3, "mpich"), ON_OPEN_MPI])
def test_local_steps(ranks: int, mpi: str) -> None:
    found = outcome("torch/local_steps", ranks, mpi=mpi, timeout=280.0)
    assert found.run.rc == 0, found.run
    for rank, told in enumerate(found.ranks):
        assert max(told["differ"].values()) < 1e-5, (rank, told["differ"])
        assert told["as plain"] < 1e-6, rank
        assert all(each["resumed equal"] for each in told["ends"].values()), (rank, told["ends"])
        if ranks > 1:
            assert "DisagreementError" in told["other values"], (rank, told["other values"])
            assert "initial parameters" in told["other values"]
            assert "must have taken as many steps" in told["fewer steps"], (
                rank,
                told["fewer steps"],
            )
    for name in found.ranks[0]["ends"]:
        ends = [told["ends"][name] for told in found.ranks]
        assert len({each["own"] for each in ends}) == ranks, "ranks train by themselves"
        assert len({digest for each in ends for digest in each["common"]}) == 1, name
        assert {each["exchanges"] for each in ends} == {9}, ends

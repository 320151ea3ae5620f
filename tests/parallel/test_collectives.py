"""Collectives under Horovod's names and gradients of plain arrays, on one to three ranks."""

from __future__ import annotations

import pytest

from tests.parallel.programs.collective_program import check
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(150)]

RUNS = [(1, "overlap", "mpich"), (3, "changing", "mpich"), (2, "overlap", "openmpi")]


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize(("ranks", "mode", "mpi"), RUNS)
def test_collective(ranks: int, mode: str, mpi: str, name: str) -> None:
    found = outcome("collective_program", ranks, mode, mpi=mpi, timeout=140)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert name in results, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run

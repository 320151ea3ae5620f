"""Named operations of wfbp.torch on one to four ranks."""

from __future__ import annotations

import pytest

from tests.parallel.programs.named_operations import check
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(150)]

RUNS = [(1, "mpich"), (3, "mpich"), (4, "mpich"), (2, "openmpi")]


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize(("ranks", "mpi"), RUNS)
def test_named_operation(ranks: int, mpi: str, name: str) -> None:
    found = outcome("named_operations", ranks, "overlap", mpi=mpi, timeout=140)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert name in results, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run

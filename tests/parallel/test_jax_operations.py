"""Collectives on JAX arrays, inside ``jit`` and outside, on one to four ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from tests.parallel.programs.jax_operations import check
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]

RUNS = [(1, "mpich"), (2, "openmpi"), (3, "mpich"), (4, "mpich")]


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize(("ranks", "mpi"), RUNS)
def test_operation(ranks: int, mpi: str, name: str) -> None:
    found = outcome("jax_operations", ranks, "overlap", mpi=mpi, timeout=110)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert name in results, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run

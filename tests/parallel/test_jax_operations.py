"""Collectives on JAX arrays, inside ``jit`` and outside, on one to four ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")

from tests.parallel.programs.jax_operations import check
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]

RUNS = [(1, "mpich"), (2, "openmpi"), (3, "mpich")]

AT_FOUR = (
    "values_inside_jit_and_outside",
    "order_is_that_of_the_program",
    "odd_shapes",
    "broadcast_of_a_tree",
    "means_of_metrics",
)
"""Checks that also run on four ranks; compiling the others four times takes long."""


def passes(ranks: int, mpi: str, name: str, *only: str) -> None:
    found = outcome("jax_operations", ranks, "overlap", *only, mpi=mpi, timeout=110)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert name in results, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run


@pytest.mark.parametrize("name", check.all)
@pytest.mark.parametrize(("ranks", "mpi"), RUNS)
def test_operation(ranks: int, mpi: str, name: str) -> None:
    passes(ranks, mpi, name)


@pytest.mark.parametrize("name", AT_FOUR)
def test_operation_on_four_ranks(name: str) -> None:
    passes(4, "mpich", name, *AT_FOUR)

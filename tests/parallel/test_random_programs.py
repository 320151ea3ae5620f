"""Random training loops on real jobs, with plans that change and ranks that differ."""

from __future__ import annotations

import pytest

from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(100)]


@pytest.mark.parametrize(
    ("ranks", "mpi", "count"), [(2, "mpich", 60), (3, "mpich", 30), (2, "openmpi", 30)]
)
def test_every_gradient_is_the_mean(ranks: int, mpi: str, count: int) -> None:
    found = outcome("random_programs", ranks, count, mpi=mpi, timeout=90)
    assert found.run.rc == 0, found.run
    assert found.ranks == [count] * ranks

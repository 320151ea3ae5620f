"""The contract on real MPI, one job per library and number of ranks that runs every check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.checks import CHECKS
from tests.support.launcher import Run

PROGRAM = Path(__file__).with_name("mpi_program.py")


@pytest.mark.parallel
@pytest.mark.timeout(400)  # four ranks may share two cores
@pytest.mark.parametrize(
    ("num_ranks", "mpi"),
    [
        (1, "mpich"),
        pytest.param(2, "mpich", marks=pytest.mark.quick),
        pytest.param(3, "mpich", marks=pytest.mark.long),
        (4, "mpich"),
        # Messages are the same under both libraries: a pair of ranks, and more.
        pytest.param(2, "openmpi", marks=pytest.mark.quick),
        pytest.param(3, "openmpi", marks=pytest.mark.long),
    ],
)
def test_contract(mpirun: Callable[..., Run], mpi: str, num_ranks: int, tmp_path: Path) -> None:
    run = mpirun(num_ranks, PROGRAM, tmp_path, mpi=mpi, timeout=380.0)
    reports = [tmp_path / f"rank{rank}" for rank in range(num_ranks)]
    told = "\n".join(report.read_text() for report in reports if report.exists())
    expected = "\n".join([f"passed {len(CHECKS)}"] * num_ranks)
    assert told == expected, told + run.stdout + run.stderr
    assert run.rc == 0, run.stderr

"""The contract on real MPI, one job per number of ranks that runs every check.

The MPI library is the one of the running interpreter. ``WFBP_TEST_PYTHONS`` may name further
interpreters (separated by colons), each with the ``mpirun`` of its own library beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.contract.checks import CHECKS
from tests.contract.launch import mpirun

PYTHONS = [sys.executable, *filter(None, os.environ.get("WFBP_TEST_PYTHONS", "").split(":"))]


@pytest.mark.parallel
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("python", PYTHONS)
def test_contract(python: str, num_ranks: int, tmp_path: Path) -> None:
    run = mpirun(num_ranks, ["-m", "tests.contract.mpi_program", str(tmp_path)], python=python)
    reports = [tmp_path / f"rank{rank}" for rank in range(num_ranks)]
    told = "\n".join(report.read_text() for report in reports if report.exists())
    assert told == "\n".join([f"passed {len(CHECKS)}"] * num_ranks), told + run.stdout + run.stderr
    assert run.returncode == 0, run.stderr

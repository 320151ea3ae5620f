"""Named operations of wfbp.torch on one to four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.programs.named_operations import check
from tests.parallel.runs import PROGRAMS, outcome
from tests.support.launcher import mpirun

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


@pytest.mark.parametrize(("ranks", "mpi"), [(1, "mpich"), (2, "mpich"), (2, "openmpi")])
def test_a_program_written_for_horovod(ranks: int, mpi: str, tmp_path: Path) -> None:
    try:
        run = mpirun(ranks, "-m", "wfbp.horovod", PROGRAMS / "horovod_script.py", tmp_path, mpi=mpi)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert run.rc == 0, run
    assert len(list(tmp_path.glob("rank*.json"))) == ranks, run


def test_the_stand_in_says_how_it_is_called() -> None:
    run = mpirun(1, "-m", "wfbp.horovod")
    assert run.rc == 2, run
    assert "usage: mpirun" in run.stdout

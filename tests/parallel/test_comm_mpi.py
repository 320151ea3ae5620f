"""The MPI backend where the contract does not look: beside others, and when things go wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launcher import Run
from wfbp.comm.mpi import start
from wfbp.errors import BackendError

PROGRAMS = Path(__file__).with_name("programs")


@pytest.mark.parallel
def test_the_users_own_messages_are_not_touched(
    mpirun: Callable[..., Run], mpi: str, tmp_path: Path
) -> None:
    num_ranks = {"mpich": 3, "openmpi": 2}[mpi]
    run = mpirun(num_ranks, PROGRAMS / "comm_user_traffic.py", tmp_path, mpi=mpi)
    told = [path.read_text() for path in tmp_path.iterdir()]
    assert told == ["fine"] * num_ranks, run.stdout + run.stderr
    assert run.rc == 0, run.stderr


@pytest.mark.parallel
def test_memory_of_messages_under_way_outlives_their_backend(
    mpirun: Callable[..., Run], mpi: str, tmp_path: Path
) -> None:
    run = mpirun(2, PROGRAMS / "comm_left.py", tmp_path, mpi=mpi, timeout=100)
    assert run.rc == 0, run.stdout + run.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["fine"] * 2


@pytest.mark.parallel
def test_a_library_error_is_translated_and_abort_ends_every_rank(
    mpirun: Callable[..., Run], mpi: str, tmp_path: Path
) -> None:
    run = mpirun(2, PROGRAMS / "comm_mismatch.py", tmp_path, mpi=mpi, timeout=100)
    assert run.rc not in (0, None), run.stdout + run.stderr
    told = (tmp_path / "rank0").read_text()
    assert told.startswith("rank 0 of 2: communication failed: ")
    assert "truncate" in told.lower()


def test_without_mpi_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(BackendError, match=r"pip install 'wfbp\[mpich\]'") as caught:
        start.load()
    assert isinstance(caught.value.__cause__, ImportError)

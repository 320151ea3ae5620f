"""Launchers that promise more ranks than MPI finds, and variables that promise nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from wfbp.comm.mpi.start import broken_promise, check_launch
from wfbp.errors import BackendError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
# What srun gives its tasks, and what there is in a batch script and in the shell of an allocation.
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4"}
TASK = {**ALLOCATION, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
SCRIPT = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "0", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        (TORCHRUN, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "WORLD_SIZE"),
        (TASK, "SLURM_STEP_NUM_TASKS"),
        ({**ALLOCATION, "SLURM_PROCID": "2"}, "SLURM_NTASKS"),
        (OMPI, "OMPI_COMM_WORLD_SIZE"),
        (HYDRA, "PMI_SIZE"),
        ({"MPI_LOCALNRANKS": "4"}, "MPI_LOCALNRANKS"),
        ({"PALS_RANKID": "1"}, "PALS_RANKID"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK"),
        ({**HYDRA, **TORCHRUN, "PMI_SIZE": "1"}, "WORLD_SIZE"),
    ],
)
def test_more_ranks_were_promised(environment: dict[str, str], variable: str) -> None:
    promise = broken_promise(environment, 1)
    assert promise is not None
    assert promise.variable == variable
    assert 1 < promise.size <= 4


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "1", "RANK": "0"}, 1),
        ({"WORLD_SIZE": "4"}, 1),  # exported by a script, for what it will start
        ({"WORLD_SIZE": "many", "RANK": "0"}, 1),
        (SCRIPT, 1),
        ({**SCRIPT, "SLURM_STEP_ID": "4294967291"}, 1),
        ({**TASK, "SLURM_STEP_ID": "4294967290"}, 1),  # the shell of salloc
        ({**TASK, "SLURM_PTY_PORT": "4711"}, 1),
        ({**TASK, "SLURM_STEP_NUM_TASKS": "1"}, 1),
        ({**TASK, **HYDRA, "PMI_SIZE": "2"}, 2),  # mpirun -n 2: its proxies are started by srun
        ({**TASK, **OMPI, "OMPI_COMM_WORLD_SIZE": "1"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "4", **HYDRA, "PMI_SIZE": "1"}, 1),
        (TORCHRUN, 4),
        (TASK, 4),
        (TASK, 8),
    ],
)
def test_nothing_is_said_where_all_is_well(environment: dict[str, str], size: int) -> None:
    assert broken_promise(environment, size) is None


class _Mpi(SimpleNamespace):
    """As much of mpi4py as is asked."""

    COMM_SELF, COMM_NULL = "self", "null"
    COMM_WORLD = SimpleNamespace(size=1)  # all that it has mapped is its own

    def __init__(self, version: str, parent: str = "null") -> None:
        super().__init__(Comm=SimpleNamespace(Get_parent=lambda: parent))
        self.Get_library_version = lambda: version


@pytest.fixture
def _torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.orig_argv", ["python", "-u", "train.py", "--name", "a b"])


@pytest.mark.usefixtures("_torchrun")
def test_the_message_has_the_command() -> None:
    version = "MPICH Version:      5.0.2\nMPICH Release date: ..."
    with pytest.raises(BackendError) as caught:
        check_launch(_Mpi(version), None)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "rank 1 of 8, says torchrun (WORLD_SIZE=8)" in text
    assert "MPI (MPICH 5.0.2) found this process alone" in text
    assert " -m wfbp run -n 8 python -u train.py --name 'a b'\n" in text
    assert "WFBP_CHECK_LAUNCHER=0" in text


@pytest.mark.usefixtures("_torchrun")
def test_a_program_that_asks_for_itself_or_was_spawned_is_left_alone() -> None:
    alone: Any = "self"
    check_launch(_Mpi("MPICH"), alone)  # type: ignore[arg-type]
    check_launch(_Mpi("MPICH", parent="that job"), None)  # type: ignore[arg-type]

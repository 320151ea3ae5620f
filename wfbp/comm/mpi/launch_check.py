"""How many ranks the launcher of this process promised, and how many MPI found.

Where something that the MPI library does not know starts a job (``torchrun``, ``srun`` with a
foreign MPI, another library's ``mpirun``), each process is a job of one rank for MPI: every one
would train alone and say nothing. Launchers leave variables in the environment, which also reach
programs that they did not start: a shell within a Slurm allocation, or what ``mpirun`` starts
there. So a variable counts only where the launcher has set it for this very process.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from wfbp.comm.mpi.start import unlink_segments
from wfbp.comm.mpi.start_notice import number
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from mpi4py import MPI

SWITCH = "WFBP_CHECK_LAUNCHER"

_Launcher = tuple[str, tuple[str, ...], tuple[str, ...]]

_MPI_LAUNCHERS: tuple[_Launcher, ...] = (
    ("Open MPI's mpirun", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",)),
    ("an mpirun with the PMI of MPICH", ("PMI_SIZE", "MPI_LOCALNRANKS"), ("PMI_RANK",)),
    ("MVAPICH's mpirun", ("MV2_COMM_WORLD_SIZE",), ("MV2_COMM_WORLD_RANK",)),
    ("PALS (mpiexec of Cray)", ("PALS_NRANKS", "PALS_SIZE"), ("PALS_RANKID",)),
    ("jsrun", ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_RANK",)),
    ("flux run", ("FLUX_JOB_SIZE",), ("FLUX_TASK_RANK",)),
    ("a launcher with PMIx", ("PMIX_SIZE",), ("PMIX_RANK",)),
)
"""Launchers of MPI programs, and the variables in which they tell each process that they start how
many ranks there are, and its own number."""

_SRUN: _Launcher = (
    "srun",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    ("SLURM_PROCID",),
)

_SLURM_SHELLS = range(2**32 - 16, 2**32)
"""Numbers that Slurm gives to the script of ``sbatch`` and the shell of ``salloc``."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a launcher says.

    Args:
        size: how many ranks there are; at least, where only a rank's number is known.
        rank: this process's number, where it is known.
        local_size: how many of them on this host, where that is known.
        is_exact: whether ``size`` is what the launcher said.
    """

    launcher: str
    variable: str
    size: int
    rank: int | None = None
    local_size: int | None = None
    is_exact: bool = True


def promises(environment: Mapping[str, str]) -> tuple[list[Promise], list[Promise]]:
    """What the launchers of this process say: those of MPI programs first, then all others.

    Example:
        >>> promises({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})[1][0].size
        2
        >>> promises({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"})  # a program run by hand in sbatch
        ([], [])
    """
    of_mpi = []
    for launcher, sizes, ranks in _MPI_LAUNCHERS:
        if promise := _promise_of(environment, launcher, sizes, ranks):
            of_mpi.append(promise)
    others = []
    if _started_by_srun(environment) and (promise := _promise_of(environment, *_SRUN)):
        others.append(promise)
    if "RANK" in environment or "TORCHELASTIC_RUN_ID" in environment:
        local = number(("LOCAL_WORLD_SIZE",), environment)
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "its environment"
        if promise := _promise_of(environment, launcher, ("WORLD_SIZE",), ("RANK",), local):
            others.append(promise)
    return of_mpi, others


def broken_promise(environment: Mapping[str, str], size: int) -> Promise | None:
    """The promise of a launcher of this process that has more ranks than MPI; None without one.

    A launcher of MPI programs that promised as many ranks as MPI has started this process. Other
    variables then describe that launcher itself, or its shell.
    """
    of_mpi, others = promises(environment)
    if any(promise.size == size and promise.is_exact for promise in of_mpi):
        # mpirun -n 1 in an allocation or a shell with leftovers; but torchrun is unmistakable
        others = [p for p in others if p.launcher == "torchrun" and size == 1]
        of_mpi = []
    return next((promise for promise in (*others, *of_mpi) if promise.size > size), None)


def check_launch(mpi: ModuleType, comm: MPI.Comm | None) -> None:
    """Raise ``BackendError``, with the right command, if a launcher promised more ranks than MPI
    has."""
    # A program that asks for itself alone knows what it does; one that MPI has spawned has the
    # variables of the job that spawned it.
    if comm is not None and comm == mpi.COMM_SELF:
        return
    size = mpi.COMM_WORLD.size
    environment: Mapping[str, str] = os.environ
    promise = broken_promise(environment, size)
    if promise is None or mpi.Comm.Get_parent() != mpi.COMM_NULL:
        return
    unlink_segments(mpi)  # this process may be killed as soon as the first one has failed
    version = mpi.Get_library_version().split(",")[0].split("\n")[0].rstrip("\0")
    library = " ".join(version.replace("Version:", "").split())
    who = "one" if promise.rank is None else f"rank {promise.rank}"
    more = "" if promise.is_exact else " or more"
    actual = "this process alone" if size == 1 else f"{size} ranks"
    raise BackendError(
        f"this process is {who} of {promise.size}{more}, says {promise.launcher} "
        f"({promise.variable}={environment[promise.variable]}), but MPI ({library}) found "
        f"{actual}: the others would train apart. Start all as one job, by the "
        "mpirun of this library:\n"
        f"    {_command(promise, library)}\n{_srun_hint(promise, library)}"
        f"Where this process is to be a job of its own, set {SWITCH}=0"
    )


def _promise_of(
    environment: Mapping[str, str],
    launcher: str,
    sizes: tuple[str, ...],
    ranks: tuple[str, ...],
    local_size: int | None = None,
) -> Promise | None:
    rank = number(ranks, environment)
    for variable in sizes:
        if (size := number((variable,), environment)) is not None:
            return Promise(launcher, variable, size, rank, local_size)
    if rank is None:
        return None
    variable = next(name for name in ranks if name in environment)
    return Promise(launcher, variable, rank + 1, rank, local_size, is_exact=False)


def _started_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task of a job step.

    A batch script and a terminal (``srun --pty``) see the allocation's variables with the numbers
    of a first task; programs started by hand there are no tasks.
    """
    if "SLURM_PTY_PORT" in environment:
        return False
    step = number(("SLURM_STEP_ID", "SLURM_STEPID"), environment)
    if step is not None:
        return step not in _SLURM_SHELLS and "SLURM_PROCID" in environment
    return (number(("SLURM_PROCID",), environment) or 0) > 0


def _command(promise: Promise, library: str) -> str:
    """What starts this program as one job."""
    launcher = "mpirun"
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    if os.path.exists(beside):
        on_path = shutil.which("mpirun")
        if on_path is None or not os.path.samefile(on_path, beside):
            launcher = shlex.quote(beside)
    words = [launcher, "-n", str(promise.size)]
    per_host = promise.local_size
    if per_host is not None and 0 < per_host < promise.size:
        words += (
            ["--host", f"HOST1:{per_host},HOST2:{per_host},..."]
            if "Open MPI" in library
            else ["-ppn", str(per_host), "-hosts", "HOST1,HOST2,..."]
        )
    program = sys.orig_argv
    if len(program) < 2 or program[1] == "-c":  # a program in the command line is no help to read
        program = [sys.executable, *(sys.argv if sys.argv[0] not in ("", "-c") else ["PROGRAM.py"])]
    return " ".join([*words, *map(shlex.quote, program)])


def _srun_hint(promise: Promise, library: str) -> str:
    if promise.launcher != "srun":
        return ""
    kind = "pmix" if "Open MPI" in library else "pmi2"
    return f"within sbatch or salloc; or by srun --mpi={kind}, where both can do that. "

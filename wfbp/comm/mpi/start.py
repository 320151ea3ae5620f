"""Starts MPI when needed, and checks that it found as many ranks as the launcher promised.

If MPI does not recognize the launcher (``torchrun``, a foreign ``srun`` or ``mpirun``), each
process is silently a job of one rank. Launchers' variables also reach programs that they did not
start (a shell in a Slurm allocation), so a variable counts only if set for this very process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from wfbp.comm.mpi import start_notice
from wfbp.errors import BackendError
from wfbp.launcher.rank import RANK, RANK_OF_MPI, SIZE, number, under_launcher

if TYPE_CHECKING:
    from mpi4py import MPI

_NOTICE_S = 3.0
"""Delay from the notice to the traceback and the exit."""


def load(timeout_s: float | None = None) -> ModuleType:
    """Import ``mpi4py.MPI``, which starts MPI; ``BackendError`` without MPI or its threads. MPICH
    waits forever for a rank that has ended: after ``timeout_s`` a timer ends the process with a
    traceback."""
    if "mpi4py.MPI" not in sys.modules:
        _check_process()
        _check_shared_memory()
    try:
        with _ending_after(timeout_s if "mpi4py.MPI" not in sys.modules else None):
            mpi = _start_which_waits_for_every_rank()
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"MPI could not be started ({error}); install mpi4py and an MPI library, for example "
            "by: pip install 'wfbp[mpich]'"
        ) from error
    _mark_process()
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendError(
            "MPI was started without support for threads (MPI_THREAD_MULTIPLE), which wfbp needs "
            "because it communicates on a separate thread; let mpi4py start MPI, or start it "
            "with MPI_Init_thread"
        )
    return mpi


def _check_process() -> None:
    """Raise ``BackendError`` in a process that a rank has started."""
    if started_by_rank():
        raise BackendError(
            f"this process was started by rank {number(RANK, os.environ)} and is no rank itself, "
            "so it cannot call init(). If multiprocessing has started it, put the program's own "
            "lines under `if __name__ == '__main__':`; if it is to train alone, start it by "
            "`wfbprun -n 1`"
        )


def started_by_rank() -> bool:
    """Whether a rank has started this process, which has the rank's variables and is no rank."""
    if number(RANK_OF_MPI, os.environ) is None:
        return False
    # A worker that multiprocessing spawns has no parent yet while it imports the program.
    is_worker = multiprocessing.parent_process() is not None or getattr(
        multiprocessing.current_process(), "_inheriting", False
    )
    # Open MPI's job and the process of the rank, of which this one inherited the variable.
    job, _, owner = os.environ.get("_WFBP_RANK", "").rpartition(":")
    is_of_rank = job == os.environ.get("PMIX_NAMESPACE") and owner != str(os.getpid())
    return is_worker or is_of_rank or _has_lost_launcher()


def _has_lost_launcher() -> bool:
    """Whether the launcher's connection is closed here: a rank's children do not inherit it."""
    descriptor = number(("PMI_FD",), os.environ)
    if descriptor is None:
        return False
    try:
        return not stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return True


def _mark_process() -> None:
    """Let processes that this one starts know that they are no ranks."""
    if job := os.environ.get("PMIX_NAMESPACE"):
        os.environ["_WFBP_RANK"] = f"{job}:{os.getpid()}"
    descriptor = number(("PMI_FD",), os.environ)
    if descriptor is not None:
        with suppress(OSError):  # MPI has ended
            os.set_inheritable(descriptor, False)


_SHM = "/dev/shm"
_SHM_MIB, _SHM_MIB_PER_RANK = 16, 4
"""MPICH's start ends with signal 7 or 11 if it has less; measured with version 5.0.2."""


def _check_shared_memory() -> None:
    """Raise ``BackendError`` if ``/dev/shm`` is too small for MPICH's ranks on this host."""
    rank, ranks = number(("PMI_RANK",), os.environ), number(("MPI_LOCALNRANKS",), os.environ)
    if rank is None or ranks is None or not os.path.isdir(_SHM):
        return
    # All of it, not what is free: other ranks may have started.
    status = os.statvfs(_SHM)
    size_mib = status.f_blocks * status.f_frsize / 2**20
    needed_mib = _SHM_MIB + _SHM_MIB_PER_RANK * ranks
    if size_mib < needed_mib:
        raise BackendError(
            f"rank {rank}: {_SHM} has {size_mib:.0f} MiB, expected at least {needed_mib} MiB for "
            f"{ranks} ranks on this host; enlarge it (docker run --shm-size=1g), or start fewer"
        )


def unlink_segments(mpi: ModuleType) -> None:
    """Remove the names of MPICH's shared memory on this host; it stays usable. An aborted job would
    leave it in ``/dev/shm``. All ranks of the job on this host must have mapped it."""
    alone = mpi.COMM_WORLD.size == 1
    # In a job of one process also Open MPI's segments, which otherwise attach later.
    names = start_notice.segments("self", ("mpich_", "sm_segment.") if alone else ("mpich_",))
    start_notice.unlink(names)


def _start_which_waits_for_every_rank() -> ModuleType:
    """Start MPI; the name appears in the traceback of a rank whose peers never started."""
    from mpi4py import MPI

    return MPI


@contextmanager
def _ending_after(timeout_s: float | None) -> Iterator[None]:
    """End the process, with the reason and a traceback, if the block takes longer."""
    output = sys.__stderr__
    if timeout_s is None or output is None:
        yield
        return
    notice = None
    # The fault handler's timer needs no interpreter. There is one per process: a program's own
    # timer is lost. Another process prints the reason.
    faulthandler.dump_traceback_later(timeout_s + _NOTICE_S, exit=True, file=output)
    try:
        if sys.executable and under_launcher():
            # Without site and the user's variables it starts in some milliseconds. In a session of
            # its own, an interrupt from the keyboard does not reach it.
            rank, size = number(RANK, os.environ), number(SIZE, os.environ)
            who = f"rank {rank}" + ("" if size is None else f" of {size}")
            notice = subprocess.Popen(
                [sys.executable, "-I", "-S", start_notice.__file__, str(timeout_s), who],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        yield
    finally:
        if notice is not None:
            notice.communicate(start_notice.OVER)
        faulthandler.cancel_dump_traceback_later()


def world_rank() -> str:
    """This rank as a message prefix before ranks are connected; empty before MPI starts."""
    from mpi4py import MPI

    if not MPI.Is_initialized():
        return ""
    return f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: "


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
"""MPI launchers, and their variables for the number of ranks and for this rank's number."""

_SRUN: _Launcher = (
    "srun",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    ("SLURM_PROCID",),
)

_SLURM_SHELLS = range(2**32 - 16, 2**32)
"""Step numbers that Slurm gives to the script of ``sbatch`` and the shell of ``salloc``."""


class Promise(NamedTuple):
    """A launcher's number of ranks (a lower bound unless ``is_exact``), and its variable."""

    launcher: str
    variable: str
    size: int
    rank: int | None = None
    is_exact: bool = True


def broken_promise(environment: Mapping[str, str], size: int) -> Promise | None:
    """The promise of this process's launcher that exceeds MPI's ``size`` ranks, or None."""
    of_mpi = [_promise_of(environment, *launcher) for launcher in _MPI_LAUNCHERS]
    others = [_promise_of(environment, *_SRUN)] if _started_by_srun(environment) else []
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if by_torchrun or "RANK" in environment:
        launcher = "torchrun" if by_torchrun else "its environment"
        others.append(_promise_of(environment, launcher, ("WORLD_SIZE",), ("RANK",)))
    if any(promise and promise.size == size and promise.is_exact for promise in of_mpi):
        # A launcher of MPI programs that promised as many ranks as MPI has started this process:
        # other variables describe that launcher itself, or its shell. (But torchrun starts each
        # process itself.)
        of_mpi = []
        others = others[-1:] if by_torchrun and size == 1 else []
    promises = (promise for promise in (*others, *of_mpi) if promise)
    return next((promise for promise in promises if promise.size > size), None)


def check_launch(mpi: ModuleType, comm: MPI.Comm | None) -> None:
    """Raise ``BackendError`` with the right command if a launcher promised more ranks."""
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
    # A program in the command line is no help to read.
    options = takewhile(lambda argument: argument.startswith("-"), sys.orig_argv[1:])
    program = ["PROGRAM.py"] if "-c" in options else sys.orig_argv
    command = [sys.executable, "-m", "wfbp", "run", "-n", str(promise.size), *program]
    raise BackendError(
        f"this process is {who} of {promise.size}{more}, says {promise.launcher} "
        f"({promise.variable}={environment[promise.variable]}), but MPI ({library}) found "
        f"{actual}: the others would train separately. Start all as one job with wfbprun, which "
        f"finds the mpirun of this library:\n    {shlex.join(command)}\n"
        f"If this process should be a separate job, set WFBP_CHECK_LAUNCHER=0"
    )


def _promise_of(
    environment: Mapping[str, str], launcher: str, sizes: tuple[str, ...], ranks: tuple[str, ...]
) -> Promise | None:
    rank = number(ranks, environment)
    for variable in sizes:
        if (size := number((variable,), environment)) is not None:
            return Promise(launcher, variable, size, rank)
    if rank is None:
        return None
    variable = next(name for name in ranks if name in environment)
    return Promise(launcher, variable, rank + 1, rank, is_exact=False)


def started_by_launcher(environment: Mapping[str, str]) -> bool:
    """Whether MPI's launcher or srun has started this process; not the shell of an allocation."""
    of_mpi = (_promise_of(environment, *launcher) for launcher in _MPI_LAUNCHERS)
    return any(of_mpi) or _started_by_srun(environment)


def _started_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether this process is a task of a job step."""
    # Batch scripts and terminals (``srun --pty``) have the allocation's variables, with the numbers
    # of a first task, but programs started by hand there are no tasks.
    if "SLURM_PTY_PORT" in environment:
        return False
    step = number(("SLURM_STEP_ID", "SLURM_STEPID"), environment)
    if step is not None:
        return step not in _SLURM_SHELLS and "SLURM_PROCID" in environment
    return (number(("SLURM_PROCID",), environment) or 0) > 0


def communicator(mpi: ModuleType, ranks: Sequence[int]) -> MPI.Comm:
    """A communicator of these ranks; the others need not call this."""
    world = mpi.COMM_WORLD
    if world.rank not in ranks:
        raise ValueError(f"rank {world.rank} is none of the ranks {list(ranks)} that take part")
    made: MPI.Comm = world.Create_group(world.group.Incl(list(ranks)))
    return made

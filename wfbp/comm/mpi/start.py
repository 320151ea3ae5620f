"""Loading mpi4py, and with it MPI, at the moment it is needed."""

from __future__ import annotations

import faulthandler
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

from wfbp.comm.mpi import start_notice
from wfbp.errors import BackendError

_NOTICE_S = 3.0
"""So much later than the notice of why comes the stack, and the end."""


def load(timeout_s: float | None = None) -> ModuleType:
    """The module ``mpi4py.MPI``; importing it starts MPI.

    MPI starts when all ranks have come, and MPICH waits forever for one that has ended. No Python
    code runs meanwhile, so after ``timeout_s`` a timer prints where the process is and ends it.

    Raises:
        BackendError: mpi4py or the MPI library is missing, or MPI does not allow threads.
    """
    try:
        with _ending_after(timeout_s if "mpi4py.MPI" not in sys.modules else None):
            mpi = _start_which_waits_for_every_rank()
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"MPI could not be started ({error}); install mpi4py and an MPI library, for example "
            "by: pip install wfbp[mpich]"
        ) from error
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise BackendError(
            "MPI was started without support for threads (MPI_THREAD_MULTIPLE), which wfbp needs "
            "because it communicates on a thread of its own; let mpi4py start MPI, or start it "
            "with MPI_Init_thread"
        )
    return mpi


def unlink_segments(mpi: ModuleType) -> None:
    """Remove the names of the memory that MPICH shares among the ranks of this host.

    MPICH removes them in ``MPI_Finalize`` only, so an aborted job would leave its memory in
    ``/dev/shm`` for good. All ranks of this job on this host must have mapped it; it stays usable.
    """
    pattern = _SEGMENT_ALONE if mpi.COMM_WORLD.size == 1 else _SEGMENT
    try:
        with open("/proc/self/maps") as file:
            names = {match[0] for line in file if (match := pattern.search(line.rstrip()))}
    except OSError:  # no such system: neither are there such names
        return
    for name in names:
        with suppress(OSError):  # another rank was faster
            os.unlink(name)


_SEGMENT = re.compile(r"/dev/shm/mpich_\w+$")
_SEGMENT_ALONE = re.compile(r"/dev/shm/(mpich_\w+|sm_segment\.\S+)$")
"""Of a job of one process also that of Open MPI, which otherwise attaches later."""


def _start_which_waits_for_every_rank() -> ModuleType:
    """Start MPI; the name shows in the traceback of a rank whose peers never came."""
    from mpi4py import MPI

    return MPI


@contextmanager
def _ending_after(timeout_s: float | None) -> Iterator[None]:
    """End the process if the block takes longer, with the reason and a traceback.

    Uses the fault handler's timer, which needs no interpreter; there is one per process, so a
    handler of the program is lost. Another process prints the reason.
    """
    output = sys.__stderr__
    if timeout_s is None or output is None:
        yield
        return
    faulthandler.dump_traceback_later(timeout_s + _NOTICE_S, exit=True, file=output)
    try:
        with _noticing(timeout_s):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _noticing(timeout_s: float) -> Iterator[None]:
    """Have a process report that other ranks are missing, if the block takes longer."""
    if not (sys.executable and start_notice.under_launcher()):
        yield
        return
    # Without site and the user's variables it starts in some milliseconds. In a session of its own,
    # an interrupt from the keyboard is not for it.
    program = [sys.executable, "-I", "-S", start_notice.__file__, str(timeout_s)]
    notice = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        notice.communicate(start_notice.OVER)


def world_rank() -> str:
    """Who this is, for a message of a rank that has not met the others; empty before MPI starts."""
    from mpi4py import MPI

    if not MPI.Is_initialized():
        return ""
    return f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: "

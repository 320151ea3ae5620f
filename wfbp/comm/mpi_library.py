"""Loading mpi4py, and with it MPI, at the moment it is needed."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from wfbp.errors import BackendError


def load(timeout_s: float | None = None) -> ModuleType:
    """The module ``mpi4py.MPI``; importing it starts MPI.

    Args:
        timeout_s: how long the start may take, after which the process says where it stands and
            ends. MPI starts when all ranks have come; one that ended before is waited for for
            ever by MPICH, and no Python code runs meanwhile.

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


def _start_which_waits_for_every_rank() -> ModuleType:
    """Named for the traceback that tells who never came."""
    from mpi4py import MPI

    return MPI


@contextmanager
def _ending_after(timeout_s: float | None) -> Iterator[None]:
    """End the process if the block takes longer, with a traceback of where it is.

    By the fault handler's timer, which needs no interpreter; there is one per process, and
    whoever had set it loses it.
    """
    output = sys.__stderr__
    if timeout_s is None or output is None:
        yield
        return
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=output)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()

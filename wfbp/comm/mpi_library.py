"""Loading mpi4py, and with it MPI, at the moment it is needed."""

from __future__ import annotations

from types import ModuleType

from wfbp.errors import BackendError


def load() -> ModuleType:
    """The module ``mpi4py.MPI``; importing it starts MPI.

    Raises:
        BackendError: mpi4py or the MPI library is missing, or MPI does not allow threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"MPI could not be started ({error}); install mpi4py and an MPI library, for example "
            "by: pip install wfbp[mpich]"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendError(
            "MPI was started without support for threads (MPI_THREAD_MULTIPLE), which wfbp needs "
            "because it communicates on a thread of its own; let mpi4py start MPI, or start it "
            "with MPI_Init_thread"
        )
    return MPI

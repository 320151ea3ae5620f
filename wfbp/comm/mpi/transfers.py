"""Messages under way, tested together, and what follows once they are complete.

A transfer is some messages, perhaps a reduction of what has arrived, and perhaps more messages
after it. All of that happens in one call of the C++ extension without the interpreter: a training
thread that holds it is neither waited for nor held up.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wfbp import native
from wfbp.comm.backend import Buffer, reduction
from wfbp.core.types import Op
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

Message = tuple[Buffer, int, bool]
"""Contiguous memory, the rank that it is for or from, and whether it arrives."""


class Reduction(NamedTuple):
    """Contributions to combine: for each piece one contribution per rank, and where the result
    goes."""

    dtype: str
    op: Op
    pieces: Sequence[tuple[Sequence[Buffer], Buffer]]


class Transfer(Protocol):
    """What was begun."""

    @property
    def done(self) -> bool:
        """Whether all of it is complete."""


class Transfers(Protocol):
    """The transfers of a backend and its duplicates; for one thread.

    The caller keeps a transfer's memory until it is done or, after an error, forever. Nothing is
    called any more after an error of the library.
    """

    def begin(
        self,
        comm: MPI.Comm,
        tag: int,
        messages: Sequence[Message],
        reduced: Reduction | None = None,
        then: Sequence[Message] = (),
    ) -> Transfer:
        """Start ``messages`` with this tag; once all are complete, combine ``reduced`` and start
        ``then``, with the next tag."""

    def progress(self) -> int:
        """Move all transfers on, without blocking; how many messages have ended."""

    def rest(self, nap_s: float, most_s: float) -> int:
        """Sleep, moving all transfers on every ``nap_s`` seconds, until one is done or ``most_s``
        have passed; returns how many messages have ended."""


def find_transfers(mpi: ModuleType) -> NativeTransfers:
    """Transfers that call the functions of the MPI library that mpi4py has loaded.

    Raises ``BackendError`` if that cannot be done.
    """
    try:
        return NativeTransfers(mpi, native.Transfers(**_functions(mpi)))
    except (OSError, AttributeError, ValueError) as error:
        raise BackendError(
            f"the functions of the MPI library cannot be called directly, which wfbp needs: {error}"
        ) from error


class NativeTransfers:
    """Transfers by the C++ extension, which calls the library that mpi4py has loaded."""

    def __init__(self, mpi: ModuleType, extension: native.Transfers) -> None:
        self._handle_of = mpi._handleof
        self._extension = extension
        self.progress = extension.progress
        self.rest = extension.rest

    def begin(
        self,
        comm: MPI.Comm,
        tag: int,
        messages: Sequence[Message],
        reduced: Reduction | None = None,
        then: Sequence[Message] = (),
    ) -> Transfer:
        handle = self._handle_of(comm)
        if reduced is None:
            return self._extension.begin(handle, tag, messages, then=then)
        op, divisor = reduction(reduced.op, comm.size)
        return self._extension.begin(
            handle, tag, messages, reduced.dtype, op, divisor, reduced.pieces, then
        )


def _functions(mpi: ModuleType) -> dict[str, Any]:
    """The addresses of MPI functions and the sizes that the extension needs.

    Raises:
        OSError: the library cannot be opened.
        AttributeError: it lacks a function.
        ValueError: handles differ in size, or errors end the job (for a test of several messages
            MPICH calls the error handler of ``COMM_SELF``).
    """
    if mpi.COMM_SELF.Get_errhandler() != mpi.ERRORS_RETURN:
        raise ValueError("the error handler of COMM_SELF is not ERRORS_RETURN, mpi4py's default")
    library = ctypes.CDLL(mpi.__file__)  # which finds what it is linked to
    sizes = {mpi._sizeof(kind) for kind in (mpi.Comm, mpi.Datatype, mpi.Request)}
    if len(sizes) > 1:
        raise ValueError(f"handles of {sorted(sizes)} bytes")
    return {
        "isend": _address(library.MPI_Isend),
        "irecv": _address(library.MPI_Irecv),
        "testsome": _address(library.MPI_Testsome),
        "handle_bytes": sizes.pop(),
        "byte": mpi._handleof(mpi.BYTE),
        "status_bytes": mpi._sizeof(mpi.Status),
        "error_at": _error_at(mpi),
        "success": mpi.SUCCESS,
        "error": mpi.Exception,
    }


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _error_at(mpi: ModuleType) -> int:
    """The offset of the error in a status, found by a marker; ``AttributeError`` without one."""
    status = mpi.Status()
    mark = 0x5A17C0DE
    status.Set_error(mark)
    raw = ctypes.string_at(mpi._addressof(status), mpi._sizeof(mpi.Status))
    at = raw.find(mark.to_bytes(4, sys.byteorder))
    if at < 0:
        raise AttributeError("a status keeps no error")
    return at

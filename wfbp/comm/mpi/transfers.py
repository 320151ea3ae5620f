"""Messages under way, tested together, and what follows once they are complete.

A transfer is some messages, perhaps a reduction of what has arrived, and perhaps more messages
behind it. Where the C++ extension is installed and the library's functions can be found
(:class:`NativeTransfers`), all of that happens in one call without the interpreter: a training
thread that holds it is neither waited for nor held up. Elsewhere :class:`PythonTransfers` does the
same. What crosses the network is the same; ranks may mix.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from wfbp import native
from wfbp.comm.backend import Buffer
from wfbp.comm.buffers import combine, reduction
from wfbp.core.types import Op

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


def find_transfers(mpi: ModuleType, tells: bool = True) -> Transfers:
    """Native transfers where the extension and the library allow it, else those in Python.

    ``tells``: log it where only the library prevents native ones.
    """
    if native.Transfers is None:
        return PythonTransfers()  # the reason has been logged
    try:
        return NativeTransfers(mpi, native.Transfers(**_functions(mpi)))
    except (OSError, AttributeError, ValueError) as error:
        if tells:
            logging.getLogger("wfbp").warning(
                "the functions of the MPI library cannot be called directly (%s): messages go "
                "through Python, which is slower",
                error,
            )
        return PythonTransfers()


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


class PythonTransfers:
    """Transfers by mpi4py."""

    def __init__(self) -> None:
        self._under_way: list[_Transfer] = []

    def begin(
        self,
        comm: MPI.Comm,
        tag: int,
        messages: Sequence[Message],
        reduced: Reduction | None = None,
        then: Sequence[Message] = (),
    ) -> Transfer:
        transfer = _Transfer(comm, tag, reduced, then)
        self._under_way.append(transfer)
        transfer.start(messages, tag)
        self._move(transfer)
        return transfer

    def progress(self) -> int:
        return sum(self._move(transfer) for transfer in [*self._under_way])

    def rest(self, nap_s: float, most_s: float) -> int:
        end_s = time.perf_counter() + most_s
        before = len(self._under_way)
        ended = 0
        while True:
            time.sleep(nap_s)
            ended += self.progress()
            if len(self._under_way) < max(1, before) or time.perf_counter() >= end_s:
                return ended

    def _move(self, transfer: _Transfer) -> int:
        ended = transfer.move()
        if transfer.done:
            self._under_way.remove(transfer)
        return ended


class _Transfer:
    def __init__(
        self, comm: MPI.Comm, tag: int, reduced: Reduction | None, then: Sequence[Message]
    ) -> None:
        self._comm = comm
        self._tag = tag
        self._reduced = reduced
        self._then: Sequence[Message] | None = then
        self._pending: list[MPI.Request] = []
        self.done = False

    def start(self, messages: Sequence[Message], tag: int) -> None:
        for data, peer, incoming in messages:
            begin = self._comm.Irecv if incoming else self._comm.Isend
            self._pending.append(begin(data.view(np.uint8), peer, tag))
        self._pending.reverse()  # looked at from the end

    def move(self) -> int:
        """How many messages have ended."""
        ended = 0
        while self._pending:
            if not self._pending[-1].Test():
                return ended
            self._pending.pop()
            ended += 1
        then, self._then = self._then, None
        if then is not None:
            if self._reduced is not None:
                for contributions, result in self._reduced.pieces:
                    combine(contributions, result, self._reduced.dtype, self._reduced.op)
            self.start(then, self._tag + 1)
        self.done = not self._pending
        return ended


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

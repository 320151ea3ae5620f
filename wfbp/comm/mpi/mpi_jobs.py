"""Jobs that one library collective carries out, and the all-gather of unknown lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wfbp.comm.mpi.mpi_channel import NUM_TAGS, Job

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


class LibraryCollective(Job):
    """One non-blocking collective.

    Args:
        nbytes: what travels.
        begin: starts it.
        after: what is left to do on this rank once it is complete.
    """

    __slots__ = ("_after", "_begin", "_request")

    def __init__(
        self, nbytes: int, begin: Callable[[], MPI.Request], after: Callable[[], None] | None = None
    ) -> None:
        self.nbytes = nbytes
        self._begin = begin
        self._after = after

    def start(self) -> None:
        self._request = self._begin()

    def step(self) -> bool:
        if not self._request.Test():
            return False
        if self._after is not None:
            self._after()
        return True

    def may_progress(self) -> bool:
        return self._request.Get_status()


class BytesGather(Job):
    """Every rank's payload, of any length: each rank sends its own to every other.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: the communicator.
        sequence: number of the job on its channel, the same on every rank.
        payload: what this rank has to say.
    """

    __slots__ = ("_comm", "_missing", "_mpi", "_parts", "_pending", "_tag")

    def __init__(self, mpi: ModuleType, comm: MPI.Comm, sequence: int, payload: bytes) -> None:
        self.nbytes = len(payload)
        self._mpi = mpi
        self._comm = comm
        self._tag = 2 * (sequence % NUM_TAGS)
        self._parts: list[bytes | bytearray] = [b""] * comm.size
        self._parts[comm.rank] = payload
        self._missing: list[int] = []
        self._pending: list[MPI.Request] = []

    def start(self) -> None:
        rank, size = self._comm.rank, self._comm.size
        payload = [self._parts[rank], self._mpi.BYTE]
        self._missing = [(rank + step) % size for step in range(1, size)]
        self._pending = [self._comm.Isend(payload, peer, self._tag) for peer in self._missing]

    def step(self) -> bool:
        still_missing = []
        for peer in self._missing:
            status = self._mpi.Status()
            message = self._comm.Improbe(peer, self._tag, status)
            if message is None:
                still_missing.append(peer)
                continue
            part = self._parts[peer] = bytearray(status.Get_count(self._mpi.BYTE))
            self._pending.append(message.Irecv([part, self._mpi.BYTE]))
        self._missing = still_missing
        self._pending = [request for request in self._pending if not request.Test()]
        return not self._missing and not self._pending

    def value(self) -> list[bytes]:
        """The payloads in rank order."""
        return [bytes(part) for part in self._parts]

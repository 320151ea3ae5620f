"""Jobs that the MPI library's own non-blocking collectives carry out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.comm.mpi_channel import Job

if TYPE_CHECKING:
    from mpi4py import MPI


class Library(Job):
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


class GatherBytes(Job):
    """Every rank's payload, of any length: lengths first, then the payloads themselves."""

    __slots__ = ("_comm", "_lengths", "_payload", "_received", "_request")

    def __init__(self, comm: MPI.Comm, payload: bytes) -> None:
        self.nbytes = len(payload)
        self._comm = comm
        self._payload = np.frombuffer(payload, np.uint8)
        self._lengths = np.zeros(comm.size, np.int64)
        self._received: Buffer | None = None

    def start(self) -> None:
        mine = np.array([self._payload.size], np.int64)
        self._request = self._comm.Iallgather(mine, self._lengths)

    def step(self) -> bool:
        if not self._request.Test():
            return False
        if self._received is not None:
            return True
        self._received = np.empty(int(self._lengths.sum()), np.uint8)
        self._request = gather(self._comm, self._payload, self._received, self._lengths.tolist())
        return False

    def value(self) -> list[bytes]:
        """The payloads in rank order."""
        assert self._received is not None, "result before test() was True"
        ends = np.cumsum(self._lengths).tolist()
        return [
            self._received[end - length : end].tobytes()
            for end, length in zip(ends, self._lengths.tolist(), strict=True)
        ]


def gather(comm: MPI.Comm, send: Buffer, receive: Buffer, counts: Sequence[int]) -> MPI.Request:
    """Start an all-gather of ``counts[rank]`` bytes from each rank."""
    return comm.Iallgatherv(send, [receive, list(counts)])

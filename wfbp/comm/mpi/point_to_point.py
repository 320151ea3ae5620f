"""Messages between two ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Mailbox, Work
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

NOTICE_TAG = 1
_FIRST_TAG = 2
_CLOSE_S = 5.0
"""How long :meth:`PointToPoint.close` waits for ranks that do not read."""

_unsent: list[tuple[MPI.Request, object]] = []
"""Messages under way when their channel was closed: their memory must outlive them."""


@contextmanager
def translating(mpi: ModuleType, who: str, what: str) -> Iterator[None]:
    """Within it MPI's errors become this package's."""
    try:
        yield
    except mpi.Exception as error:
        raise BackendError(f"{who}: {what}: {error}") from error


class PointToPoint(Mailbox):
    """Notices and messages of any size between ranks, on a separate communicator; those to this
    rank stay local."""

    def __init__(self, mpi: ModuleType, comm: MPI.Comm) -> None:
        self._mpi = mpi
        self._comm = comm
        self._who = f"rank {comm.rank} of {comm.size}"
        self._status = mpi.Status()
        self._own: list[tuple[int, bytes]] = []
        # Requests that had not ended at the last look, and their memory.
        self._notices: list[tuple[MPI.Request, object]] = []
        self._messages: list[tuple[MPI.Request, object]] = []

    @property
    def sending(self) -> bool:
        return bool(self._notices or self._messages)

    def send(self, rank: int, payload: bytes) -> None:
        data = bytes(payload)
        if rank == self._comm.rank:
            self._own.append((rank, data))
            return
        with translating(self._mpi, self._who, "a message could not be sent"):
            # Kept until it is complete: MPI may read the bytes until then.
            request = self._comm.Isend([data, self._mpi.BYTE], rank, NOTICE_TAG)
            if not request.Test():
                self._notices.append((request, data))

    def start(self, buffer: Buffer, peer: int, tag: int, receives: bool) -> _Message:
        """Start to send or receive a message; notices use another tag."""
        begin = self._comm.Irecv if receives else self._comm.Isend
        what = f"a message could not be {'received' if receives else 'sent'}"
        with translating(self._mpi, self._who, what):
            request = begin([buffer, self._mpi.BYTE], peer, _FIRST_TAG + tag)
        self._messages.append((request, buffer))
        return _Message(self._mpi, self._who, request)

    def receive(self) -> list[tuple[int, bytes]]:
        status = self._status
        own, self._own = self._own, []
        arrived = []
        with translating(self._mpi, self._who, "messages could not be read"):
            if self._notices or self._messages:
                self._notices = _under_way(self._notices)
                self._messages = _under_way(self._messages)
            # Matched at once: no other thread can take the message between probe and receive.
            while (
                message := self._comm.Improbe(self._mpi.ANY_SOURCE, NOTICE_TAG, status)
            ) is not None:
                content = bytearray(status.Get_count(self._mpi.BYTE))
                message.Recv([content, self._mpi.BYTE])
                arrived.append((status.Get_source(), bytes(content)))
        return arrived + own  # what had arrived before this rank's came first

    def close(self) -> None:
        """Send the notices that are under way, and free the communicator."""
        deadline_s = time.monotonic() + _CLOSE_S
        with translating(self._mpi, self._who, "closing failed"):
            # MPI's queues to many ranks may be full, and no later call would move these notices on.
            while (notices := _under_way(self._notices)) and time.monotonic() < deadline_s:
                time.sleep(1e-3)
            _unsent.extend(notices + _under_way(self._messages))
            self._comm.Free()


def _under_way(items: list[tuple[MPI.Request, object]]) -> list[tuple[MPI.Request, object]]:
    return [item for item in items if not item[0].Test()]


class _Message(Work[None]):
    """A message between two ranks, whose memory :class:`PointToPoint` keeps."""

    def __init__(self, mpi: ModuleType, who: str, request: MPI.Request) -> None:
        self._mpi, self._who, self._request = mpi, who, request

    def test(self) -> bool:
        with translating(self._mpi, self._who, "a message between two ranks failed"):
            return bool(self._request.Test())

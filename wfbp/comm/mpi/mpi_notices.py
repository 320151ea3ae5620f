"""Messages outside any collective: notices from one rank to all others, and between two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

    from wfbp.comm.backend import Buffer

TAG = 1
_FIRST_TAG = 2

_unsent: list[tuple[MPI.Request, bytes | Buffer]] = []
"""Messages under way when their board was closed: their memory must outlive them."""


class NoticeBoard:
    """Sends and collects notices on a communicator of its own. For one thread at a time.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: a communicator that nothing else uses.
    """

    def __init__(self, mpi: ModuleType, comm: MPI.Comm) -> None:
        self._mpi = mpi
        self._comm = comm
        self._sending: list[tuple[MPI.Request, bytes | Buffer]] = []

    def send(self, payload: bytes) -> None:
        """Send to every other rank."""
        for step in range(1, self._comm.size):
            self.send_to((self._comm.rank + step) % self._comm.size, payload)

    def send_to(self, peer: int, payload: bytes) -> None:
        """Send to one rank."""
        request = self._comm.Isend([payload, self._mpi.BYTE], peer, TAG)
        self._sending.append((request, payload))

    def start_send(self, buffer: Buffer, peer: int, tag: int) -> MPI.Request:
        """Send to one rank; tags are apart from those of notices."""
        request = self._comm.Isend([buffer, self._mpi.BYTE], peer, _FIRST_TAG + tag)
        self._sending.append((request, buffer))
        return request

    def start_receive(self, buffer: Buffer, peer: int, tag: int) -> MPI.Request:
        """Receive what :meth:`start_send` sends."""
        request = self._comm.Irecv([buffer, self._mpi.BYTE], peer, _FIRST_TAG + tag)
        self._sending.append((request, buffer))
        return request

    def poll(self) -> list[tuple[int, bytes]]:
        """What has arrived since the last call, with the sender's rank."""
        if self._sending:
            self._sending = [item for item in self._sending if not item[0].Test()]
        arrived = []
        status = self._mpi.Status()
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, TAG, status)) is not None:
            content = bytearray(status.Get_count(self._mpi.BYTE))
            message.Recv([content, self._mpi.BYTE])
            arrived.append((status.Get_source(), bytes(content)))
        return arrived

    def close(self) -> None:
        """Give the communicator back; what is still under way goes on."""
        _unsent.extend(item for item in self._sending if not item[0].Test())
        self._comm.Free()

"""Messages of any length, unknown to the receiver: between two ranks, and from each to all."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wfbp.comm.mpi.transfers import Channel, Task
from wfbp.errors import BackendError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

_CLOSE_S = 5.0
"""How long :meth:`PointToPoint.close` waits for ranks that do not read."""

_kept: list[object] = []
"""Messages under way when their channel was closed: their memory must outlive them."""


@contextmanager
def translating(mpi: ModuleType, who: str, what: str) -> Iterator[None]:
    """Within it MPI's errors become this package's."""
    try:
        yield
    except mpi.Exception as error:
        raise BackendError(f"{who}: {what}: {error}") from error


class PointToPoint:
    """Messages of any length between two ranks, with a tag that nothing else on ``comm`` has."""

    def __init__(self, mpi: ModuleType, comm: MPI.Comm, tag: int = 1) -> None:
        self._mpi = mpi
        self._comm, self._tag = comm, tag
        self._who = f"rank {comm.rank} of {comm.size}"
        self._status = mpi.Status()
        # Those that had not ended at the last look; MPI uses their memory.
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._arriving: list[tuple[int, MPI.Request, bytearray]] = []

    @property
    def sending(self) -> bool:
        return bool(self._sends)

    def send(self, rank: int, payload: bytes) -> None:
        with translating(self._mpi, self._who, "a message could not be sent"):
            request = self._comm.Isend([payload, self._mpi.BYTE], rank, self._tag)
            if not request.Test():
                self._sends.append((request, payload))

    def receive(self, one_of: set[int] | None = None) -> list[tuple[int, bytes]]:
        """Messages that have arrived, as (sender, content), in each sender's order.

        ``one_of``: take one message of each of these ranks, and remove them as messages appear.
        """
        status, byte = self._status, self._mpi.BYTE
        with translating(self._mpi, self._who, "messages could not be read"):
            self._advance_sends()
            # Matched at once: no other thread can take the message between probe and receive.
            sources = [self._mpi.ANY_SOURCE] if one_of is None else list(one_of)
            for source in sources:
                while (message := self._comm.Improbe(source, self._tag, status)) is not None:
                    content = bytearray(status.Get_count(byte))
                    request = message.Irecv([content, byte])
                    self._arriving.append((status.Get_source(), request, content))
                    if one_of is not None:
                        one_of.discard(source)
                        break
            arrived, waiting, self._arriving = [], self._arriving, []
            for source, request, content in waiting:
                # Not before an earlier one of this sender.
                if source in [late for late, *_ in self._arriving] or not request.Test():
                    self._arriving.append((source, request, content))
                else:
                    arrived.append((source, bytes(content)))
        return arrived

    def close(self) -> None:
        """Send the messages that are under way, and free the communicator."""
        deadline_s = time.monotonic() + _CLOSE_S
        with translating(self._mpi, self._who, "closing failed"):
            # MPI's queues to many ranks may be full, and no later call would move these on.
            while self._advance_sends() and time.monotonic() < deadline_s:
                time.sleep(1e-3)
            _kept.extend([self._sends, self._arriving])
            self._comm.Free()

    def _advance_sends(self) -> bool:
        """Forget the messages that are sent; whether some are under way."""
        if self._sends:
            self._sends = [item for item in self._sends if not item[0].Test()]
        return bool(self._sends)


class BytesTask(Task):
    """Every rank's payload, of any length: each rank sends its own to every other."""

    def __init__(self, channel: Channel, payload: bytes) -> None:
        self.nbytes = len(payload)
        self._channel = channel
        self._payloads = {channel.rank: payload}
        self._unmatched = set(channel.peers)  # a later task may use the tag again

    def start(self) -> None:
        channel = self._channel
        # The tag is chosen here, because ranks agree on the order of starts.
        self._messages = PointToPoint(channel.mpi, channel.comm, channel.next_tag())
        for peer in channel.peers:
            self._messages.send(peer, self._payloads[channel.rank])

    def step(self) -> bool:
        self._payloads.update(self._messages.receive(self._unmatched))
        return len(self._payloads) == self._channel.size and not self._messages.sending

    def value(self) -> list[bytes]:
        """The payloads in rank order."""
        return [self._payloads[rank] for rank in range(self._channel.size)]

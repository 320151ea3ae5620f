"""Messages between two ranks; their length need not be known to the receiver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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

"""Control channels: collectives of bytes that a training thread waits for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from wfbp.comm.backend import Finished, HostBackend, Work
from wfbp.errors import DisagreementError
from wfbp.runtime.progress.stall import ALL_RANKS, Members
from wfbp.runtime.progress.thread import CommunicationThread

T = TypeVar("T")


class ControlChannel:
    """Collectives on one backend; every rank calls the same ones in the same order.

    Channels on different backends are independent. Any training thread may use one; threads whose
    order of exchanges differs between ranks need a channel each.
    """

    def __init__(
        self,
        thread: CommunicationThread,
        backend: HostBackend,
        check: Callable[[], None],
        where: str,
        members: Members = ALL_RANKS,
    ) -> None:
        self._thread = thread
        self._backend = backend
        self._check = check
        self._where = where
        self._members = members

    def call(self, start: Callable[[HostBackend], Work[T]], label: str) -> T:
        """Run one collective, begun by ``start``, and return its result."""
        self._check()
        backend = self._backend
        return self._thread.call(lambda: start(backend), label, backend, self._members)

    def run(self, act: Callable[[HostBackend], T], label: str) -> T:
        """Run a function under the progress lock after earlier collectives; returns its result."""
        return self.call(lambda backend: Finished(act(backend)), label)

    def exchange(self, payload: bytes, label: str, purpose: str = "") -> list[bytes]:
        """Every rank's payload, in rank order; ``DisagreementError`` if purposes differ."""
        # Compared before a payload of another purpose is read.
        letter = (purpose or label).replace("\0", "\\0").encode() + b"\0" + payload
        tagged = self.call(lambda backend: backend.all_gather_bytes(letter), label)
        purposes, _, payloads = zip(*(each.partition(b"\0") for each in tagged), strict=True)
        for rank, other in enumerate(purposes):
            if other != purposes[0]:
                raise DisagreementError(
                    f"{self._where}: ranks called different operations: {purposes[0].decode()} on "
                    f"rank 0, {other.decode()} on rank {rank}. Every rank must call the same "
                    "operations in the same order with the same names, element types and shapes"
                )
        return list(payloads)

    def exchange_if_different(self, payload: bytes, label: str, purpose: str = "") -> list[bytes]:
        """As :meth:`exchange`, but an empty list if all are equal: then only digests are sent."""
        digest = hashlib.sha256(payload).digest()
        if len(set(self.exchange(digest, label, purpose))) == 1:
            return []
        return self.exchange(payload, label, purpose)

    def close(self) -> None:
        """Close the backend; under the progress lock, and nothing may be under way."""
        self._backend.close()

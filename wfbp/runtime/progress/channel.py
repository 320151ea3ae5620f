"""Control channels: collectives of bytes that a training thread waits for."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from wfbp.comm.backend import Finished, HostBackend, Work
from wfbp.errors import DisagreementError
from wfbp.runtime.progress.stall import ALL_RANKS, Members
from wfbp.runtime.progress.thread import CommunicationThread

_LENGTH_BYTES = 4

T = TypeVar("T")


def encode_tagged(purpose: str, payload: bytes) -> bytes:
    """The payload after its purpose."""
    text = purpose.encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + payload


def decode_tagged(where: str, tagged: Sequence[bytes]) -> list[bytes]:
    """Every rank's payload from :func:`encode_tagged`; ``DisagreementError`` if purposes differ."""
    purposes, payloads = [], []
    for letter in tagged:
        start = _LENGTH_BYTES + int.from_bytes(letter[:_LENGTH_BYTES], "little")
        purposes.append(letter[_LENGTH_BYTES:start].decode())
        payloads.append(letter[start:])
    for rank, purpose in enumerate(purposes):
        if purpose != purposes[0]:
            raise DisagreementError(
                f"{where}: ranks called different operations: {purposes[0]} on rank 0, {purpose} "
                f"on rank {rank}. Every rank must call the same operations in the same order with "
                "the same names, element types and shapes"
            )
    return payloads


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
        letter = encode_tagged(purpose or label, payload)
        tagged = self.call(lambda backend: backend.all_gather_bytes(letter), label)
        return decode_tagged(self._where, tagged)

    def exchange_if_different(self, payload: bytes, label: str, purpose: str = "") -> list[bytes]:
        """As :meth:`exchange`, but an empty list if all are equal: then only digests are sent."""
        digest = hashlib.sha256(payload).digest()
        if len(set(self.exchange(digest, label, purpose))) == 1:
            return []
        return self.exchange(payload, label, purpose)

    def close(self) -> None:
        """Close the backend; under the progress lock, and nothing may be under way."""
        self._backend.close()


class CollectiveLock:
    """Orders operations that block a rank until all ranks have begun them.

    Examples are making communicators and measuring the network: ranks in different ones would
    deadlock. Rank 0 decides the order; the others learn it on each operation's own control channel.
    Any training thread may take the lock.
    """

    def __init__(self, rank: int) -> None:
        # Held by rank 0 from before any rank begins an operation until every rank has ended it.
        self._lock = threading.Lock() if rank == 0 else None

    @contextmanager
    def hold(self, channel: ControlChannel, label: str) -> Iterator[None]:
        """Context that excludes other such operations on all ranks; collective on ``channel``."""
        with self._lock or nullcontext():
            channel.exchange(b"", f"{label}: its turn")
            yield
            channel.exchange(b"", f"{label}: its end")

"""Control channels: collectives of bytes that a training thread waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

from wfbp.comm.backend import Backend, Work
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
    """Every rank's payload, as :func:`encode_tagged` made it.

    Raises ``DisagreementError``, with the purposes of two ranks, if purposes differ.

    Example:
        >>> decode_tagged(
        ...     "rank 0 of 2", [encode_tagged("greeting", b"I"), encode_tagged("greeting", b"me")])
        [b'I', b'me']
    """
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
    """Collectives on one backend, one after another; every rank calls the same in the same order.

    Channels on different backends are independent: ranks may use them in different orders. Any
    training thread may use one; threads whose exchanges may come in another order on other ranks
    need a channel each. ``check`` raises the error that has ended the runtime, if any.
    """

    def __init__(
        self,
        thread: CommunicationThread,
        backend: Backend,
        check: Callable[[], None],
        where: str,
        members: Members = ALL_RANKS,
    ) -> None:
        self._thread = thread
        self._backend = backend
        self._check = check
        self._where = where
        self._members = members

    def call(self, start: Callable[[Backend], Work[T]], label: str) -> T:
        """Run one collective, begun by ``start``, and return its result."""
        self._check()
        backend = self._backend
        return self._thread.call(lambda: start(backend), label, backend, self._members)

    def exchange(self, payload: bytes, label: str, purpose: str = "") -> list[bytes]:
        """Every rank's payload, in rank order, after comparing its purpose, by default the label.

        Raises ``DisagreementError`` on every rank, with the purposes of two.
        """
        # Before anybody reads a payload of another purpose.
        letter = encode_tagged(purpose or label, payload)
        tagged = self.call(lambda backend: backend.all_gather_bytes(letter), label)
        return decode_tagged(self._where, tagged)

    def close(self) -> None:
        """Give the backend back; under the progress lock, and nothing may be under way."""
        self._backend.close()


class CollectiveLock:
    """Orders operations that block a whole rank until all ranks have come to them.

    Examples are making a communicator and measuring the network: ranks in different ones would wait
    for each other forever. Rank 0 decides which comes first, and the others learn it on the
    operation's own control channel. Any training thread may take the lock.
    """

    def __init__(self, rank: int) -> None:
        # Held by rank 0 from before any rank begins an operation until every rank has ended it.
        self._lock = threading.Lock() if rank == 0 else None

    @contextmanager
    def hold(self, channel: ControlChannel, label: str) -> Iterator[None]:
        """A context in which no rank is in another such operation; collective among the channel's
        ranks."""
        with self._lock or nullcontext():
            channel.exchange(b"", f"{label}: its turn")
            yield
            channel.exchange(b"", f"{label}: its end")

    def take(self) -> bool:
        """On rank 0: take it, unless somebody has it, for an operation that other ranks begin
        because rank 0 tells them; to be released when every rank has ended that."""
        assert self._lock is not None
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Release it."""
        assert self._lock is not None
        self._lock.release()

"""Control channels: collectives of bytes that a training thread waits for.

Each payload carries a tag that says what for. Exchanges meet in the order in which ranks come to
them; ranks that have come to different ones find out by the tag, before anybody reads a payload
that was meant for another purpose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from wfbp.comm.backend import Backend, Work
from wfbp.errors import DisagreementError
from wfbp.runtime.progress.deadlock import ALL_RANKS, Members
from wfbp.runtime.progress.thread import CommunicationThread

_LENGTH_BYTES = 4


def encode_tagged(purpose: str, payload: bytes) -> bytes:
    """The payload behind its purpose."""
    text = purpose.encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + payload


def decode_tagged(where: str, tagged: Sequence[bytes]) -> list[bytes]:
    """Every rank's payload.

    Args:
        where: who this is, for messages ("rank 1 of 4").
        tagged: what :func:`encode_tagged` gave on each rank.

    Raises:
        DisagreementError: purposes differ; those of two ranks.

    Example:
        >>> decode_tagged(
        ...     "rank 0 of 2", [encode_tagged("greeting", b"I"), encode_tagged("greeting", b"me")])
        [b'I', b'me']
    """
    opened = [_split_tag(letter) for letter in tagged]
    first = opened[0][0]
    for rank, (purpose, _) in enumerate(opened):
        if purpose != first:
            raise DisagreementError(
                f"{where}: ranks called different operations: {first} on rank 0, {purpose} on rank "
                f"{rank}. Every rank must call the same operations in the same order with the same "
                "names, element types and shapes"
            )
    return [payload for _, payload in opened]


def _split_tag(letter: bytes) -> tuple[str, bytes]:
    start = _LENGTH_BYTES + int.from_bytes(letter[:_LENGTH_BYTES], "little")
    return letter[_LENGTH_BYTES:start].decode(), letter[start:]


T = TypeVar("T")


class ControlChannel:
    """Collectives on one backend, one after another; every rank calls the same in the same order.

    Channels on different backends do not wait for each other: their collectives may come in any
    order, and not the same on every rank. Any training thread may use one.

    Args:
        thread: speaks to the backend.
        backend: whose collectives these are; lanes may use it beside them.
        check: raises what ended the runtime, if anything has.
        where: who this is, for messages ("rank 1 of 4").
        members: the ranks that are on the backend.
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
        """Run one collective and return its result.

        Args:
            start: starts it on the backend.
            label: what it is, for messages.
        """
        self._check()
        backend = self._backend
        return self._thread.call(lambda: start(backend), label, backend, self._members)

    def close(self) -> None:
        """Give the backend back; under the progress lock, and nothing may be under way."""
        self._backend.close()

    def exchange(self, payload: bytes, label: str, purpose: str = "") -> list[bytes]:
        """Every rank's payload, in rank order, after comparing what ranks exchange them for.

        Args:
            payload: of this rank.
            label: what this is, for messages.
            purpose: what is compared; the label by default.

        Raises:
            DisagreementError: on every rank; the purposes of two.
        """
        letter = encode_tagged(purpose or label, payload)
        tagged = self.call(lambda backend: backend.all_gather_bytes(letter), label)
        return decode_tagged(self._where, tagged)


class CollectiveLock:
    """Lets operations that hold a whole rank up until all have come to them run one by one.

    Making a communicator and measuring the network are such. Ranks that were in different ones
    would wait for each other for ever; so rank 0 decides which comes first, and the others learn it
    on the operation's own control channel. Any training thread may take it.

    Args:
        rank: of this process.
    """

    def __init__(self, rank: int) -> None:
        # Held by rank 0 from before any rank begins an operation until every rank has ended it.
        self._open: AbstractContextManager[Any] = threading.Lock() if rank == 0 else nullcontext()

    @contextmanager
    def hold(self, channel: ControlChannel, label: str) -> Iterator[None]:
        """Within it no rank is in another such operation; collective among ranks on the channel.

        Args:
            channel: in which all ranks come to this, at the same place.
            label: what this is, for messages.
        """
        with self._open:
            channel.exchange(b"", f"{label}: its turn")
            yield
            channel.exchange(b"", f"{label}: its end")

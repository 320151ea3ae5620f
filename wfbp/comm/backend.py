"""The seam between the runtime and whatever moves bytes between ranks.

A backend and its duplicates are spoken to by one thread at a time (the communication thread).
Every rank starts the same collectives in the same order on the same backend; each returns a
:class:`Work` at once. Progress is made inside :meth:`Work.test`, for everything under way on the
backend and its duplicates, so ranks may wait for their works in different orders. A buffer
belongs to its work until ``test()`` returned True. ``tests/contract`` is the specification that
every implementation passes.
"""

from __future__ import annotations

import mmap
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from wfbp.core.types import Op, item_bytes
from wfbp.native import reduce_shards

T = TypeVar("T")

Buffer = npt.NDArray[Any]
"""A one-dimensional C-contiguous array; bfloat16 is stored as uint16."""


class Segment(NamedTuple):
    """A part of a collective's buffer whose data lie in memory of their own: large tensors are sent
    from where they are, without a copy into the buffer.

    Args:
        start: its first byte in the buffer of an all-reduce, or in each block otherwise.
        data: the memory, read or written until the work is complete.
        counts: where the buffer consists of blocks, bytes of each rank's part of ``data``, in rank
            order; the same on every rank.
        result: where an all-reduce writes the result, if :meth:`Backend.copies_segments`, not
            into the buffer; may be ``data``.
    """

    start: int
    data: Buffer
    counts: Sequence[int] = ()
    result: Buffer | None = None


class Work(ABC, Generic[T]):
    """One collective under way; ``nbytes`` is the size of its message."""

    nbytes: int = 0

    @property
    def activity(self) -> int:
        """The activity of the backend that carries it."""
        return 0

    @abstractmethod
    def test(self) -> bool:
        """Move the collective on, without blocking; True once it is complete on this rank."""

    @property
    @abstractmethod
    def result(self) -> T:
        """What the collective returns, once ``test()`` was True."""


class Backend(ABC):
    """Collectives among ``size`` ranks, in place where they can be.

    ``dtype`` is a key of ``core.types.ITEM_BYTES``; float16 and bfloat16 are accumulated in float32
    and rounded once. ``counts`` are bytes of each rank's block, also none, whole elements, the same
    on every rank. ``segments`` are in ascending order and do not overlap; their starts and lengths
    are whole elements, and the same on every rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    library: str = "no MPI"
    """What carries messages, for people."""

    @property
    def activity(self) -> int:
        """A number that changes whenever anything moves on here or on a duplicate."""
        return 0

    @property
    def progresses_alone(self) -> bool:
        """Whether data move between tests too, as over a network. In shared memory the tests copy,
        so a rank that does not test delays its peers."""
        return False

    def may_progress(self) -> bool:
        """Whether a test could move anything on, here or on a duplicate; True if unknown.

        A cheap check between naps that never blocks. It may itself do some of the work of a test.
        """
        return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        """Sleep until an operation has ended, testing every ``nap_s`` seconds, for at most
        ``most_s``; False, without sleeping, if the backend cannot or nothing is under way."""
        return False

    def stopwatch(self) -> Callable[[], float]:
        """Return a function that gives the seconds from now until all collectives started since are
        complete, once they are."""
        begin_s = time.perf_counter()
        return lambda: time.perf_counter() - begin_s

    def zeros(self, nbytes: int) -> Buffer:
        """A uint8 buffer in memory that this backend's collectives prefer. If one rank passes such
        a buffer to a collective, all ranks do."""
        return zeroed(nbytes)

    def copies_segments(self, buffer: Buffer) -> bool:
        """Whether an all-reduce of this buffer copies segments in, and their results out.

        Segments may then name a place for their result. Their memory is touched within
        :meth:`all_reduce` and ``test()`` only: a caller that calls neither may free it.
        """
        return False

    @abstractmethod
    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Segment] = ()
    ) -> Work[None]:
        """Combine ``buffer`` over all ranks, in place.

        Segments are contributions that are read elsewhere, and not written; their results go into
        the buffer, or to the place that the segment names.
        """

    @abstractmethod
    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Segment] = (),
    ) -> Work[None]:
        """Combine ``size`` adjacent blocks over all ranks. This rank's block receives its result;
        the contents of the others are undefined afterwards.

        Part r of a segment is contributed to block r.
        """

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int) -> Work[None]:
        """Copy the root's bytes of ``buffer`` to every rank, in place."""

    @abstractmethod
    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Work[None]:
        """Fill every rank's block of ``buffer``, of any element type, with that rank's own.

        This rank's part of a segment is sent from there, the others' are received there.
        """

    @abstractmethod
    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        """Every rank's payload, in rank order; lengths may differ and need not be known."""

    @abstractmethod
    def duplicate(self) -> Backend:
        """A backend over the same ranks with collectives of its own. Collective and blocking."""

    @abstractmethod
    def send_notice(self, payload: bytes) -> None:
        """Send a short message to every other rank, without waiting until it is read; not a
        collective."""

    @abstractmethod
    def poll_notices(self) -> list[tuple[int, bytes]]:
        """Notices that have arrived, each with the rank that sent it; never blocks."""

    def give_up(self) -> None:  # noqa: B027 - nothing, unless ranks read each other's memory
        """Stop waiting for everything under way, here and on duplicates.

        Buffers may change or be freed from here on; ranks that still read them fail.
        """

    def release(self) -> None:  # noqa: B027 - nothing, unless ranks read each other's memory
        """Release memory shared with other ranks, here and on duplicates, as the last call; not
        collective. Buffers that are still in use stay valid."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank at once; the last resort."""

    @abstractmethod
    def close(self) -> None:
        """Free the backend's resources; collective if the library below demands it."""


class Mailbox(ABC):
    """Messages from rank to rank, outside any collective; used by the thread of its backend.

    ``echoes``: one process plays the other ranks, which send what this one sends to itself.
    """

    echoes = False

    @property
    def sending(self) -> bool:
        """Whether a message is still on its way, which :meth:`receive` moves on."""
        return False

    @abstractmethod
    def send(self, rank: int, payload: bytes) -> None:
        """Send to one rank, also this one, without waiting for it to be read."""

    @abstractmethod
    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have arrived, each with its sender, in each sender's order; never
        blocks."""

    @abstractmethod
    def close(self) -> None:
        """Free the mailbox's resources; collective if the library below demands it."""


class HostBackend(Backend):
    """A backend for memory of the host, with what named operations need besides collectives."""

    def all_to_all(
        self, outgoing: Buffer, sent: Sequence[int], incoming: Buffer, received: Sequence[int]
    ) -> Work[None]:
        """Send every rank a block of its own.

        Block r of ``outgoing``, of ``sent[r]`` bytes, goes to rank r; block r of ``incoming``, of
        ``received[r]`` bytes, comes from rank r. The buffers do not overlap.
        """
        raise NotImplementedError

    def subset(self, ranks: Sequence[int]) -> HostBackend | None:
        """A backend over some of the ranks, in which rank ``ranks[i]`` is rank i; None on the
        others. Collective over all ranks, and blocking; ``ranks`` is ascending."""
        raise NotImplementedError

    def send(self, buffer: Buffer, peer: int, tag: int) -> Work[None]:
        """Send bytes to one other rank, which has to :meth:`receive` as many; not a collective.

        Messages of one tag (0 to 16383) between two ranks arrive in the order of sending. The
        buffer must not change until the work is complete.
        """
        raise NotImplementedError

    def receive(self, buffer: Buffer, peer: int, tag: int) -> Work[None]:
        """Receive the bytes that a rank sends with this tag; the counterpart of :meth:`send`."""
        raise NotImplementedError

    @abstractmethod
    def mailbox(self) -> Mailbox:
        """Messages between the ranks of this backend. Collective and blocking."""


class Finished(Work[T]):
    """Work that was complete when it was made (one rank, nothing to send)."""

    def __init__(self, result: T) -> None:
        self._result = result

    def test(self) -> bool:
        return True

    @property
    def result(self) -> T:
        return self._result


HALF = frozenset({"float16", "bfloat16"})
"""Element types that are accumulated in float32."""
INTEGER = frozenset({"int32", "int64", "uint8"})
_WORDS = {name: np.dtype("uint16") for name in HALF}
_MAPPED_BYTES = 64 << 10
"""From here on memory comes from the system, in pages of its own."""


def word_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type by which kernels are given elements: halves of both kinds as uint16."""
    return _WORDS.get(dtype) or np.dtype(dtype)


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds elements: their own, or uint16 for bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def typed(buffer: Buffer, dtype: str, writeable: bool = True) -> Buffer:
    """The buffer's bytes seen as elements of ``dtype`` (uint16 for the half types), not copied.

    Raises ``ValueError`` if it is not one-dimensional, not contiguous, read-only where it must be
    writeable, or holds no whole number of elements.

    >>> typed(np.zeros(8, np.uint8), "float32")
    array([0., 0.], dtype=float32)
    """
    size = item_bytes(dtype)
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(
            "a buffer must be one-dimensional and contiguous; "
            f"found shape {buffer.shape}, strides {buffer.strides}"
        )
    if writeable and not buffer.flags.writeable:
        raise ValueError("a buffer that receives must be writeable")
    if buffer.nbytes % size:
        raise ValueError(f"a buffer of {buffer.nbytes} bytes holds no whole number of {dtype}")
    words = word_dtype(dtype)
    return buffer if buffer.dtype == words else buffer.view(words)


def blocks(
    size: int, buffer: Buffer, counts: Sequence[int], dtype: str, writeable: bool = True
) -> list[Buffer]:
    """The buffer of a reduce-scatter or an all-gather as one typed block per rank.

    ``counts`` are bytes. Raises ``ValueError``, naming the size that does not fit.

    >>> blocks(2, np.zeros(3, np.float32), [8, 4], "float32")
    [array([0., 0.], dtype=float32), array([0.], dtype=float32)]
    """
    data = typed(buffer, dtype, writeable)
    check_counts(size, data.nbytes, counts, dtype)
    parts, end = [], 0
    for count in counts:
        start, end = end, end + count // data.itemsize
        parts.append(data[start:end])
    return parts


def check_counts(size: int, nbytes: int, counts: Sequence[int], dtype: str) -> None:
    """Raise ``ValueError`` unless a buffer of ``nbytes`` consists of one such block per rank."""
    item = item_bytes(dtype)
    if len(counts) != size or any(count < 0 or count % item for count in counts):
        raise ValueError(
            f"{size} ranks need {size} counts of at least 0 bytes, each a whole number of "
            f"{dtype}, found {list(counts)}"
        )
    if nbytes != sum(counts):
        raise ValueError(f"the buffer is of {nbytes} bytes, but counts add up to {sum(counts)}")


def fill(buffer: Buffer, segments: Sequence[Segment]) -> None:
    """Copy the segments of an all-reduce into its buffer."""
    for segment in segments:
        data = segment.data.view(np.uint8)
        buffer.view(np.uint8)[segment.start : segment.start + data.size] = data


def fill_blocks(
    buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment], dtype: str
) -> None:
    """The same for a reduce-scatter: part r of each segment into block r."""
    size = len(counts)
    whole = blocks(size, buffer.view(np.uint8), counts, "uint8")
    for segment in segments:
        parts = blocks(size, segment.data, segment.counts, dtype, writeable=False)
        for block, part in zip(whole, parts, strict=True):
            block[segment.start : segment.start + part.nbytes] = part.view(np.uint8)


def combine(shards: Sequence[Buffer], out: Buffer, dtype: str, op: Op) -> None:
    """Combine one contribution per rank, given in rank order; AVERAGE divides by their number.

    The one definition of reduction. ``shards`` are as :func:`typed` returns them; ``out`` is one of
    them, or does not overlap any.

    >>> total = np.zeros(2, np.float32)
    >>> combine([np.float32([1, 2]), np.float32([3, 6])], total, "float32", Op.AVERAGE)
    >>> total
    array([2., 4.], dtype=float32)
    """
    reduce_shards(shards, out, dtype, *reduction(op, len(shards)))


def reduction(op: Op, num_ranks: int) -> tuple[str, float]:
    """The operation that combines the contributions, and the divisor of its result.

    >>> reduction(Op.AVERAGE, 3)
    ('sum', 3.0)
    """
    return ("sum", float(num_ranks)) if op is Op.AVERAGE else (op.value, 1.0)


def split(total: int, parts: int) -> list[tuple[int, int]]:
    """Start and end of ``parts`` consecutive ranges over ``total`` whose lengths differ by <= 1.

    >>> split(10, 3)
    [(0, 3), (3, 6), (6, 10)]
    """
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


def zeroed(nbytes: int) -> Buffer:
    """``nbytes`` zeroed bytes, as uint8; ``MemoryError`` if there are not so many.

    Untouched pages cost nothing: the part of a fusion buffer whose tensors are sent from where they
    are stays untouched. (The C library would clear memory that it has used before.)

    >>> zeroed(3)
    array([0, 0, 0], dtype=uint8)
    """
    if nbytes < _MAPPED_BYTES or sys.platform == "win32":
        return np.zeros(nbytes, np.uint8)
    # Private: a forked process writes to its own copy.
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for a buffer: {error}") from error
    return np.frombuffer(pages, np.uint8)

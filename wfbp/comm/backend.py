"""The interface between the runtime and the transports that move bytes between ranks.

Threads: one thread at a time (the communication thread) uses a backend and its duplicates. Every
rank starts the same collectives in the same order on the same backend; each returns a :class:`Work`
at once. :meth:`Work.test` makes progress for everything under way on the backend and its
duplicates, so ranks may wait for their works in different orders. A buffer belongs to its work
until ``test()`` returned True. ``tests/contract`` specifies what every implementation must do.
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

from wfbp.core.types import ITEM_BYTES, Op
from wfbp.native import reduce_shards

T = TypeVar("T")

Buffer = npt.NDArray[Any]
"""A one-dimensional C-contiguous array; bfloat16 is stored as uint16."""


class Segment(NamedTuple):
    """Part of a collective's buffer whose data are in separate memory, and are sent without a copy.

    Args:
        start: first byte in the buffer of an all-reduce, or in each block otherwise.
        data: the memory, read or written until the work is complete.
        counts: for buffers of blocks, bytes of each rank's part of ``data``; equal on all ranks.
        result: where an all-reduce writes the result instead of into the buffer, if
            :meth:`Backend.copies_segments`; may be ``data``.
    """

    start: int
    data: Buffer
    counts: Sequence[int] = ()
    result: Buffer | None = None


class Work(ABC, Generic[T]):
    """One collective under way; ``nbytes`` is the size of its message."""

    nbytes: int = 0
    mismatch: bool = False
    """Whether another rank is in a different operation, if ranks compare them (``Exchange``)."""

    @property
    def activity(self) -> int:
        """The activity of its backend."""
        return 0

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking; True once the collective is complete on this rank."""

    @property
    @abstractmethod
    def result(self) -> T:
        """The collective's result; valid once ``test()`` returned True."""


class Backend(ABC):
    """Collectives among ``size`` ranks, in place if possible.

    ``dtype`` is a key of ``core.types.ITEM_BYTES``; float16 and bfloat16 are accumulated in float32
    and rounded once. ``counts`` are bytes of each rank's block: whole elements, possibly 0, the
    same on every rank. ``segments`` ascend and do not overlap; their starts and lengths are whole
    elements and the same on every rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    library: str = "no MPI"
    """Name and version of the library below, for messages."""

    @property
    def activity(self) -> int:
        """A number that changes whenever anything makes progress here or on a duplicate."""
        return 0

    @property
    def progresses_alone(self) -> bool:
        """Whether data also move between tests (a network). In shared memory the tests copy, so a
        rank that does not test delays its peers."""
        return False

    def may_progress(self) -> bool:
        """Whether a test could make progress, here or on a duplicate; True if unknown. Cheap and
        never blocks, but may do part of a test's work."""
        return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        """Sleep until an operation ends, testing every ``nap_s`` seconds, for at most ``most_s``.
        False, without sleeping, if the backend cannot do this or nothing is under way."""
        return False

    def stopwatch(self) -> Callable[[], float]:
        """Return a function that gives the seconds from now until all collectives started since are
        complete; call it once they are."""
        begin_s = time.perf_counter()
        return lambda: time.perf_counter() - begin_s

    def zeros(self, nbytes: int) -> Buffer:
        """Zeroed uint8 memory that this backend's collectives prefer. Pass such a buffer to a
        collective on all ranks or on none."""
        return zeroed(nbytes)

    def copies_segments(self, buffer: Buffer) -> bool:
        """Whether an all-reduce of this buffer copies segments in and results out. If so, segments
        may name a ``result``, and their memory is touched only within :meth:`all_reduce` and
        ``test()``: a caller that calls neither may free it."""
        return False

    @abstractmethod
    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Segment] = ()
    ) -> Work[None]:
        """Combine ``buffer`` over all ranks, in place. Segments are read-only contributions;
        results go to the buffer, or to the segment's ``result``."""

    @abstractmethod
    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Segment] = (),
    ) -> Work[None]:
        """Combine ``size`` adjacent blocks over all ranks; part r of a segment contributes to block
        r. This rank's block receives its result; the other blocks are undefined afterwards."""

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int) -> Work[None]:
        """Copy the root's bytes of ``buffer`` to every rank, in place."""

    @abstractmethod
    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Work[None]:
        """Fill every rank's block of ``buffer`` (any element type) with that rank's data. This
        rank's part of a segment is sent from there; the others' parts are received there."""

    @abstractmethod
    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        """Every rank's payload, in rank order; lengths may differ and need not be known."""

    @abstractmethod
    def duplicate(self) -> Backend:
        """A backend over the same ranks with separate collectives. Collective and blocking."""

    @abstractmethod
    def send_notice(self, payload: bytes) -> None:
        """Send a short message to every other rank without waiting for a reader; not collective."""

    @abstractmethod
    def poll_notices(self) -> list[tuple[int, bytes]]:
        """Notices that have arrived, as (sender, payload); never blocks."""

    def give_up(self) -> None:  # noqa: B027 - nothing, unless ranks read each other's memory
        """Stop waiting for everything under way, here and on duplicates. Buffers may then change or
        be freed; ranks that still read them fail."""

    def release(self) -> None:  # noqa: B027 - nothing, unless ranks read each other's memory
        """Release memory shared with other ranks, here and on duplicates. The last call; not
        collective. Buffers still in use stay valid."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank at once; the last resort."""

    @abstractmethod
    def close(self) -> None:
        """Free the backend's resources; collective if the library below demands it."""


class Mailbox(ABC):
    """Messages from rank to rank, outside any collective; used by its backend's thread. ``echoes``:
    one process plays the other ranks, which send back what they receive."""

    echoes = False

    @property
    def sending(self) -> bool:
        """Whether a message is still being sent; :meth:`receive` makes progress on it."""
        return False

    @abstractmethod
    def send(self, rank: int, payload: bytes) -> None:
        """Send to one rank (or this one), without waiting for it to be read."""

    @abstractmethod
    def receive(self) -> list[tuple[int, bytes]]:
        """Arrived messages as (sender, payload), in each sender's order; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Free the mailbox's resources; collective if the library below demands it."""


class HostBackend(Backend):
    """A backend for host memory; adds what named operations need."""

    def all_to_all(
        self, outgoing: Buffer, sent: Sequence[int], incoming: Buffer, received: Sequence[int]
    ) -> Work[None]:
        """Send every rank its own block.

        Block r of ``outgoing`` (``sent[r]`` bytes) goes to rank r; block r of ``incoming``
        (``received[r]`` bytes) comes from rank r. The buffers do not overlap.
        """
        raise NotImplementedError

    def subset(self, ranks: Sequence[int]) -> HostBackend | None:
        """A backend over the ascending ``ranks``, with rank ``ranks[i]`` as rank i; None on the
        other ranks. Collective over all ranks, and blocking."""
        raise NotImplementedError

    def send(self, buffer: Buffer, peer: int, tag: int) -> Work[None]:
        """Send bytes to one rank, which must :meth:`receive` as many; not collective.

        Messages with one tag (0 to 16383) arrive in the order of sending. The buffer must not
        change until the work is complete.
        """
        raise NotImplementedError

    def receive(self, buffer: Buffer, peer: int, tag: int) -> Work[None]:
        """Receive the bytes that a rank sends with this tag; counterpart of :meth:`send`."""
        raise NotImplementedError

    @abstractmethod
    def mailbox(self) -> Mailbox:
        """Messages between this backend's ranks. Collective and blocking."""


class Finished(Work[T]):
    """Work that is complete when made (one rank, or nothing to send)."""

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
_WORDS = {name: np.dtype("uint16" if name in HALF else name) for name in ITEM_BYTES}
_MAPPED_BYTES = 64 << 10
"""Buffers of at least this size are mapped from the system as separate pages."""


def word_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that kernels use for elements: uint16 for both half types."""
    return _WORDS.get(dtype) or np.dtype(dtype)


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds elements: uint16 for bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def typed(buffer: Buffer, dtype: str, writeable: bool = True) -> Buffer:
    """View the buffer's bytes as ``word_dtype(dtype)``; ``ValueError`` if it is unsuitable."""
    if (words := _WORDS.get(dtype)) is None:
        raise ValueError(f"dtype {dtype!r} cannot be sent; expected one of {', '.join(_WORDS)}")
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(
            "a buffer must be one-dimensional and contiguous; "
            f"found shape {buffer.shape}, strides {buffer.strides}"
        )
    if writeable and not buffer.flags.writeable:
        raise ValueError("a buffer that receives must be writeable")
    if buffer.nbytes % words.itemsize:
        raise ValueError(f"a buffer of {buffer.nbytes} bytes holds no whole number of {dtype}")
    return buffer if buffer.dtype == words else buffer.view(words)


def blocks(
    size: int, buffer: Buffer, counts: Sequence[int], dtype: str, writeable: bool = True
) -> list[Buffer]:
    """Split a buffer into typed blocks of ``counts`` bytes, one per rank; or ``ValueError``."""
    data = typed(buffer, dtype, writeable)
    check_counts(size, data.nbytes, counts, dtype)
    parts, end = [], 0
    for count in counts:
        start, end = end, end + count // data.itemsize
        parts.append(data[start:end])
    return parts


def check_counts(size: int, nbytes: int, counts: Sequence[int], dtype: str) -> None:
    """Raise ``ValueError`` unless ``counts`` are valid blocks of a buffer of ``nbytes``."""
    item = word_dtype(dtype).itemsize
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
    """Copy the segments of a reduce-scatter into its buffer: part r of each into block r."""
    size = len(counts)
    whole = blocks(size, buffer.view(np.uint8), counts, "uint8")
    for segment in segments:
        parts = blocks(size, segment.data, segment.counts, dtype, writeable=False)
        for block, part in zip(whole, parts, strict=True):
            block[segment.start : segment.start + part.nbytes] = part.view(np.uint8)


def combine(shards: Sequence[Buffer], out: Buffer, dtype: str, op: Op) -> None:
    """Combine one contribution per rank (as :func:`typed` returns them), in rank order; the only
    definition of reduction. ``out`` is one of the shards or overlaps none."""
    reduce_shards(shards, out, dtype, *reduction(op, len(shards)))


def reduction(op: Op, num_ranks: int) -> tuple[str, float]:
    """The operation that combines the contributions, and the divisor of its result."""
    return ("sum", float(num_ranks)) if op is Op.AVERAGE else (op.value, 1.0)


def split(total: int, parts: int) -> list[tuple[int, int]]:
    """Start and end of ``parts`` consecutive ranges over ``total`` whose lengths differ by <= 1."""
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


def zeroed(nbytes: int) -> Buffer:
    """``nbytes`` zeroed bytes, as uint8; ``MemoryError`` if memory is exhausted."""
    if nbytes < _MAPPED_BYTES or sys.platform == "win32":
        return np.zeros(nbytes, np.uint8)
    # Untouched pages cost nothing, such as the part of a fusion buffer whose tensors are sent from
    # where they are. The C library would clear memory that it has used before.
    # Private: a forked process writes to its own copy.
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for a buffer: {error}") from error
    return np.frombuffer(pages, np.uint8)

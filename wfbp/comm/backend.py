"""The interface between the runtime and the transports that move bytes between ranks.

Threads: one thread at a time (the communication thread) uses a backend and its duplicates. Every
rank starts the same collectives in the same order on the same backend. Each returns a :class:`Work`
at once. :meth:`Work.test` makes progress for everything under way on the backend and its
duplicates, so ranks may wait for their works in different orders. A buffer belongs to its work
until ``test()`` returned True. ``tests/contract`` specifies what every implementation must do.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from wfbp.comm.arrays import Buffer, Segment, zeroed
from wfbp.core.types import Op
from wfbp.native import Coding

T_co = TypeVar("T_co", covariant=True)

PROBE_LIMIT = 16 << 20


class Work(ABC, Generic[T_co]):
    """One collective under way; ``nbytes`` is the size of its message."""

    nbytes: int = 0
    mismatch: bool = False
    """Whether another rank is in a different operation; ``GroupExchange`` compares them."""
    place: tuple[str, int] | None = None
    """The name of its backend and its number there, equal on all ranks; None if unknown."""

    @property
    def activity(self) -> int:
        """The activity of its backend."""
        return 0

    @property
    def moved_s(self) -> float:
        """When a part of it was last seen to be complete (``time.monotonic``); 0 if unknown."""
        return 0.0

    @abstractmethod
    def test(self) -> bool:
        """Make progress without blocking; True once the collective is complete on this rank."""

    @property
    def result(self) -> T_co:
        """The collective's result, None unless overridden; valid once ``test()`` returned True."""
        return None  # type: ignore[return-value]


class Backend(ABC):
    """Collectives among ``size`` ranks, in place if possible.

    ``dtype`` is a key of ``core.types.ITEM_BYTES``; float16 and bfloat16 are accumulated in float32
    and rounded once, or once per level (:attr:`on_two_levels`); NCCL may round partial sums.
    ``counts`` are bytes of each rank's block: whole elements, possibly 0, the same on every rank.
    ``segments`` ascend and do not overlap; their starts and lengths are whole elements and the same
    on every rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    library: str = "no MPI"
    """Name and version of the library below, for messages."""
    progresses_alone: bool = False
    """Whether data also move between tests (a network). In shared memory the tests copy, so a rank
    that does not test delays its peers."""
    step_bytes: int | None = None
    """Bytes of a large message that a network carries at a time; None in shared memory."""
    on_two_levels: bool = False
    """Whether ranks combine in shared memory within hosts, and send messages between them. All
    collectives then prefer memory of :meth:`HostBackend.zeros`; else only all-reduce does."""
    encodes: bool = False
    """Whether there are several hosts, so that :meth:`reduce_encoded` can send less."""

    @property
    def activity(self) -> int:
        """A number that changes whenever anything makes progress here or on a duplicate."""
        return 0

    @property
    def step_s(self) -> float | None:
        """Seconds between two steps of :attr:`step_bytes`, as the fastest large message took; None
        if unknown."""
        return None

    def stopwatch(self) -> Callable[[], float]:
        """Return a function that gives the seconds from now until all collectives started since are
        complete; call it once they are."""
        begin_s = time.perf_counter()
        return lambda: time.perf_counter() - begin_s

    def zeros(self, nbytes: int) -> Buffer:
        """Zeroed uint8 memory that this backend's collectives prefer. Pass such a buffer to a
        collective on all ranks or on none."""
        return zeroed(nbytes)

    def probe_limit(self) -> int:
        """Bytes of the largest message worth measuring on this rank: larger ones take memory and
        time, and cost in proportion."""
        return PROBE_LIMIT

    def trim(self) -> None:  # noqa: B027 - nothing, unless freed memory is kept
        """Give memory that no buffer uses back to the system."""

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
    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Work[None]:
        """Fill every rank's block of ``buffer`` (any element type) with that rank's data. This
        rank's part of a segment is sent from there; the others' parts are received there."""

    def reduce_encoded(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        op: Op,
        segments: Sequence[Segment],
        coding: Coding,
        results: Sequence[Segment] | None = None,
    ) -> Work[None]:
        """As :meth:`reduce_scatter` of float32, but messages are encoded, and so is each sum, which
        all use as it is decoded. With ``results``, every rank gets all of them there.
        Segments are only read within this call and ``test()``."""
        raise NotImplementedError

    @abstractmethod
    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        """Every rank's payload, in rank order; lengths may differ and need not be known."""

    def give_up(self) -> None:  # noqa: B027 - nothing, unless ranks read each other's memory
        """Stop waiting for everything under way, here and on duplicates. Buffers may then change or
        be freed; ranks that still read them fail."""

    @abstractmethod
    def close(self) -> None:
        """Free the backend's resources; collective if the library below demands it."""


class HostBackend(Backend):
    """A backend for host memory; adds what named operations and the runtime need."""

    rests: bool = False
    """Whether :meth:`rest` can sleep."""

    def begun(self) -> dict[str, int]:
        """Numbers of collectives begun here and on duplicates, by their names in ``Work.place``."""
        return {}

    def may_progress(self) -> bool:
        """Whether a test could make progress, here or on a duplicate; True if unknown. Cheap and
        never blocks, but may do part of a test's work."""
        return True

    def rest(self, nap_s: float, most_s: float) -> bool:
        """Sleep until an operation ends, testing every ``nap_s`` seconds, for at most ``most_s``.
        False, without sleeping, if nothing is under way, or unless the backend :attr:`rests`."""
        return False

    @abstractmethod
    def broadcast(self, buffer: Buffer, root: int) -> Work[None]:
        """Copy the root's bytes of ``buffer`` to every rank, in place."""

    @abstractmethod
    def duplicate(self) -> HostBackend:
        """A backend over the same ranks with separate collectives. Collective and blocking."""

    @abstractmethod
    def send_notice(self, rank: int, payload: bytes) -> None:
        """Send a message to another rank without waiting for a reader; not collective."""

    @abstractmethod
    def poll_notices(self) -> list[tuple[int, bytes]]:
        """Notices that have arrived, as (sender, payload), in each sender's order; never blocks."""

    @property
    def sends_notices(self) -> bool:
        """Whether a notice is still being sent; :meth:`poll_notices` makes progress on it."""
        return False

    def release(self) -> None:
        """Release memory shared with other ranks, here and on duplicates. The last call; not
        collective. Buffers still in use stay valid."""

    @abstractmethod
    def abort(self, code: int) -> None:
        """End every rank at once; the last resort."""

    def all_to_all(
        self, outgoing: Buffer, sent: Sequence[int], incoming: Buffer, received: Sequence[int]
    ) -> Work[None]:
        """Send block r of ``outgoing`` (``sent[r]`` bytes) to rank r, and receive block r of
        ``incoming`` (``received[r]`` bytes) from there. The buffers do not overlap."""
        raise NotImplementedError

    def subset(self, ranks: Sequence[int]) -> HostBackend | None:
        """A backend over the ascending ``ranks``, with rank ``ranks[i]`` as rank i; None on the
        other ranks. Collective over all ranks, and blocking."""
        raise NotImplementedError


class Finished(Work[T_co]):
    """Work that is complete when made (one rank, or nothing to send)."""

    def __init__(self, result: T_co) -> None:
        self._result = result

    def test(self) -> bool:
        return True

    @property
    def result(self) -> T_co:
        return self._result

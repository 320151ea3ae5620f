"""Memory for a lane's messages, and the order of what is done to it.

On the host a call has done its work when it returns: :class:`Memory`, which is the host's, has
nothing to order. On a device (``comm.device.memory``) threads only enqueue work, and events order
it between streams.

A *stamp* is a moment in the training thread's work or the lane's: seconds of ``time.perf_counter``
on the host, a timed event on a device, which becomes seconds when it has happened; 0 is "did not".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from wfbp import native
from wfbp.comm.backend import Backend, Buffer, Work, zeroed

Stamp = Any
Dependencies = Sequence[Any]
"""What a device has to wait for; empty on the host."""

_LINE_BYTES = 64


class SlotTable(Protocol):
    """A pack table (see ``wfbp.native``); on a device, copies are enqueued on a stream of it.

    Addresses are read when ``pack`` or ``unpack`` is called, memory when the stream gets there.
    """

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """Where each slot is filled from; 0 is absent."""

    def pack(self) -> None:
        """Fill every slot, with zeros where it is absent."""

    def unpack(self) -> None:
        """Copy every slot back to its address."""


class Memory:
    """Memory of the host, for one lane, whose messages ``backend`` sends.

    ``zero_copy_min_bytes``: tensors of at least this size are not packed; None to pack all.
    """

    copies_in_order = False
    """Whether copies come behind what was started before them, as on a stream: then results have to
    be copied before anything else is started."""
    flags_beside = False
    """Whether flags travel beside messages, which the host cannot read without waiting."""
    lag_steps = 0
    """While plans are measured, a step's times are read this many steps later, equally on every
    rank: by then the next steps' work is enqueued, so that the device does not become idle."""
    timing = True
    """Whether moments are wanted where they cost anything; the training thread may change it."""

    now: Callable[[], Stamp]
    """The present moment in the training thread's work."""
    produced: Callable[[], Stamp]
    """The same; called where a gradient has just appeared."""
    join: Callable[[], Stamp]
    """Order the training thread's later work behind the lane's results."""
    packed: Callable[[], Stamp]
    """The next message finds what the lane has packed by this moment."""
    ended: Callable[[], Stamp]
    """The present moment in the lane's work, where a group ends, which is watched until then."""

    def __init__(self, backend: Backend, zero_copy_min_bytes: int | None = None) -> None:
        self.backend = backend
        self.zero_copy_min_bytes = zero_copy_min_bytes
        # The clock itself, as there is nothing to order: these are called for every group.
        self.now = self.produced = self.join = self.packed = self.ended = perf_counter

    def zeros(self, nbytes: int, travels: bool = False) -> Buffer:
        """Zeroed bytes that start at a cache line; ``travels``: as an all-reduced message, in
        memory that the backend prefers."""
        size = nbytes + _LINE_BYTES
        raw = self.backend.zeros(size) if travels else zeroed(size)
        start = -raw.__array_interface__["data"][0] % _LINE_BYTES
        return raw[start : start + nbytes]

    def empty(self, nbytes: int) -> Buffer:
        """Memory for a tensor of the training thread."""
        return self.zeros(nbytes)

    def address(self, data: Buffer) -> int:
        """Where bytes lie."""
        start: int = data.__array_interface__["data"][0]
        return start

    def slot_table(
        self,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        dtype: str,
        tensor_dtype: str,
    ) -> SlotTable:
        """A table that packs before messages and unpacks behind them."""
        places = np.asarray(offsets, np.int64), np.asarray(nbytes, np.int64)
        return native.PackTable(buffer, *places, dtype, tensor_dtype)

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy bytes, in the order of the training thread's work."""
        np.copyto(target, source)

    def trim(self) -> None:
        """Give back the memory of plans that are no longer in use."""

    # Under the progress lock.

    def settle(self) -> None:
        """Memory that is taken from here on may have been in use by training or the lane."""

    def order(self, dependencies: Dependencies, behind_messages: bool = False) -> Stamp:
        """What is packed from this moment on finds what these stand for; ``behind_messages``: and
        comes behind all that the lane has sent, because buffers are used again."""
        return perf_counter()

    def with_flags(self, work: Work[None], flags: Buffer) -> Work[None]:
        """Send flags beside a message; see :attr:`flags_beside`."""
        raise NotImplementedError

    def deliver(self, table: SlotTable) -> None:
        """Copy reduced tensors out of a message, at the latest when the training thread joins."""
        table.unpack()

    def is_enqueued(self, work: Work[None]) -> bool:
        """Move a work on; True once later work of this lane may use its result.

        On the host it is complete then, on a device enqueued on the lane's stream.
        """
        return work.test()

    def may_progress(self) -> bool:
        """Whether :meth:`is_enqueued` or :meth:`poll` could find anything new."""
        return self.backend.may_progress()

    def rest(self, nap_s: float, most_s: float) -> bool:
        """Sleep until a work may have moved on; see :meth:`Backend.rest`."""
        return self.backend.rest(nap_s, most_s)

    def poll(self) -> None:
        """Called in every pass of the loop; raises ``BackendError`` if an enqueued operation has
        failed."""

    @property
    def waiting_since(self) -> float | None:
        """Since when the oldest enqueued group is not complete (``time.monotonic``)."""
        return None

    def give_up(self) -> None:
        """The lane has failed: let nothing wait for other ranks any more."""

    # On the training thread, or on backward's.

    def begin(self, profiling: bool) -> None:
        """A step begins; ``profiling`` says whether the moments of gradients are wanted."""

    def gradients(self) -> Dependencies:
        """Stand for all gradients of the step that have appeared."""
        return ()

    def close(self) -> tuple[Stamp, Dependencies]:
        """The step closes: when, and what stands for all that training has done until here."""
        return perf_counter(), ()

    def updates(self) -> Dependencies:
        """Stand for what the calling thread has done until here."""
        return ()

    def await_arrival(self, end: Stamp) -> None:
        """What the training thread does from here on finds a group that ended there."""

    def publish(self) -> None:
        """What the training thread does from here on finds what the calling one has done."""

    # Stamps, on the training thread.

    def done(self, stamp: Stamp) -> bool:
        """Whether a moment has come."""
        return True

    def clock(self, begun: Stamp, done: Stamp) -> Callable[[Stamp], float]:
        """Turns stamps of a step into seconds, as soon as it is done; 0 stays 0."""
        return float

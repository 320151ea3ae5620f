"""Memory for a lane's messages, and the order of operations on it.

On the host (:class:`Memory`) a call has finished when it returns, so nothing needs ordering. On a
device (``comm.device.device_memory``) threads enqueue work and events order it between streams.
A *stamp* is a moment in the training thread's or lane's work. On the host it is seconds of
``time.perf_counter``, on a device a timed event (seconds later). 0 means "did not happen".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wfbp import native
from wfbp.comm.arrays import Buffer, zeroed
from wfbp.comm.backend import Backend, Work


class Event:
    """A place in a stream of a device, which subclasses it."""

    __slots__ = ()


Stamp = float | Event
Dependencies = Sequence[Event]
"""Events that a device has to wait for; empty on the host."""

_LINE_BYTES = 64


class SlotTable(Protocol):
    """A pack table (see ``wfbp.native``). Addresses are read when ``pack`` or ``unpack`` is called;
    memory when the device's stream copies it."""

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """Address of each slot's source; 0 means absent."""

    def pack(self) -> None:
        """Fill every slot; absent ones with zeros."""

    def unpack(self) -> None:
        """Copy every slot back to its address."""


class Memory:
    """Host memory of one lane; tensors of at least ``zero_copy_min_bytes`` are not packed."""

    copies_in_order = False
    """Whether copies wait for earlier work, as on a stream: copy results before starting more."""
    polls = False
    """Whether the lane has more to look for than the backend's works."""
    sends_flags_separately = False
    """Whether flags travel beside messages, which the host cannot read without waiting."""
    # By then the next steps' work is enqueued, so that the device does not become idle.
    lag_steps = 0
    """While plans are measured, every rank reads a step's times this many steps later."""
    timing = True
    """Whether costly timestamps are wanted; the training thread may change it."""

    # Functions in C, as there is nothing to order or to wait for: these are called very often.
    now: Callable[[], Stamp] = staticmethod(perf_counter)
    """The present moment in the training thread's work."""
    stamp_gradient: Callable[[], Stamp] = staticmethod(perf_counter)
    """The same; called when a gradient has just appeared."""
    join: Callable[[], Stamp] = staticmethod(perf_counter)
    """Order the training thread's later work after the lane's results."""
    end_packing: Callable[[], Stamp] = staticmethod(perf_counter)
    """Order the next message after what the lane has packed so far."""
    end_group: Callable[[], Stamp] = staticmethod(perf_counter)
    """The moment at which a group ends in the lane's work; monitored until then."""
    is_enqueued: Callable[[Work[None]], bool] = staticmethod(methodcaller("test"))
    """Make progress; True once later work of this lane may use the result: on the host when the
    work is complete, on a device when it is enqueued on the lane's stream."""
    poll: Callable[[], object] = staticmethod(bool)
    """Called in every pass of the loop; ``BackendError`` if an enqueued operation failed."""
    gradient_dependencies: Callable[[], Dependencies] = staticmethod(tuple)
    """Dependencies that cover all gradients of the step so far."""
    update_dependencies: Callable[[], Dependencies] = staticmethod(tuple)
    """Dependencies that cover the calling thread's work so far."""

    def __init__(self, backend: Backend, zero_copy_min_bytes: int | None = None) -> None:
        self.backend = backend
        self.zero_copy_min_bytes = zero_copy_min_bytes

    def zeros(self, nbytes: int, travels: bool = False) -> Buffer:
        """Zeroed, cache-line-aligned bytes; ``travels``: preferred by its collectives."""
        size = nbytes + _LINE_BYTES
        raw = self.backend.zeros(size) if travels else zeroed(size)
        start = -raw.__array_interface__["data"][0] % _LINE_BYTES
        return raw[start : start + nbytes]

    def empty(self, nbytes: int) -> Buffer:
        """Memory for a tensor of the training thread."""
        return self.zeros(nbytes)

    def address(self, data: Buffer) -> int:
        """The buffer's address."""
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
        """A table that packs before messages and unpacks after them."""
        places = np.asarray(offsets, np.int64), np.asarray(nbytes, np.int64)
        return native.PackTable(buffer, *places, dtype, tensor_dtype)

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy bytes, in the order of the training thread's work."""
        np.copyto(target, source)

    def trim(self) -> None:
        """Free the memory of plans that are no longer used."""
        self.backend.trim()

    # Under the progress lock.

    def settle(self) -> None:
        """Order memory allocated from now on after training and the lane, its possible users."""

    def begin_packing(self, dependencies: Dependencies, behind_messages: bool = False) -> Stamp:
        """Order later packing after ``dependencies``; ``behind_messages``: also after all that the
        lane has sent, because buffers are reused."""
        return perf_counter()

    def with_flags(self, work: Work[None], flags: Buffer) -> Work[None]:
        """Send flags beside a message; see :attr:`sends_flags_separately`."""
        raise NotImplementedError

    def deliver(self, table: SlotTable) -> None:
        """Copy reduced tensors out of a message, at the latest when the training thread joins."""
        table.unpack()

    @property
    def waiting_since(self) -> float | None:
        """Since when the oldest enqueued group is incomplete (``time.monotonic``)."""
        return None

    def give_up(self) -> None:
        """The lane has failed: stop everything that waits for other ranks."""

    # On the training thread, or on backward's.

    def begin(self, profiling: bool) -> None:
        """Begin a step; ``profiling`` requests timestamps of gradients."""

    def close(self) -> tuple[Stamp, Dependencies]:
        """Close the step: its timestamp, and dependencies covering all training work so far."""
        return perf_counter(), ()

    def await_arrival(self, end: Stamp) -> None:
        """Order the training thread's later work after a group that ended at ``end``."""

    def publish(self) -> None:
        """Order the training thread's later work after the calling thread's work so far."""

    # Stamps, on the training thread.

    def done(self, stamp: Stamp) -> bool:
        """Whether the moment has passed."""
        return True

    def clock(self, begun: Stamp, done: Stamp) -> Callable[[Stamp], float]:
        """Return a function from a step's stamps to seconds, once the step is done; 0 stays 0."""
        return float  # type: ignore[return-value]  # on the host stamps are seconds

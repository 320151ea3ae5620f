"""The seam between the runtime and one accelerator.

Everything that happens on a device happens on *streams*, in the order in which it was enqueued on
each; an *event* marks a place in a stream, and a stream can be made to wait for an event. The host
only enqueues: no method here waits for the device. Streams are raw handles, so that those of any
framework can be named; events are opaque.

Implementations: CuPy's in ``wfbp.cuda.cupy_device``, and the tests' software device, whose streams
are threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.comm.backend import Buffer
from wfbp.comm.memory import SlotTable

_UNSEEN = nullcontext()

Event = Any
"""A place in a stream."""


class Device(ABC):
    """One accelerator. Every method may be called by any thread, and returns at once.

    ``name`` is for people; ``identity`` tells devices of all hosts apart.
    """

    name: str
    identity: str
    where = ""
    """Which rank's it is, for messages, as in "rank 1 of 4"; the runtime says so."""

    logged_reason = ""
    """Why its messages go through the host, as the log has said last."""

    @abstractmethod
    def nccl(self) -> Any:
        """The bindings of NCCL for this device, as ``cupy.cuda.nccl``; ``ImportError`` says why
        there are none."""

    @abstractmethod
    def current_stream(self) -> int:
        """The stream on which the work of the calling thread is enqueued."""

    @abstractmethod
    def new_stream(self) -> int:
        """A stream that is ordered with others by events alone; it lives as long as the device."""

    @abstractmethod
    def record(self, stream: int, timed: bool = False) -> Event:
        """An event behind all that has been enqueued on a stream."""

    @abstractmethod
    def wait(self, stream: int, event: Event) -> None:
        """Let what is enqueued on a stream from here on wait for an event."""

    @abstractmethod
    def done(self, event: Event) -> bool:
        """Whether all before an event has run; ``BackendError`` if something has failed."""

    @abstractmethod
    def seconds(self, start: Event, end: Event) -> float:
        """Device time between two timed events that are done; negative where ``end`` was first."""

    @abstractmethod
    def zeros(self, nbytes: int, stream: int) -> Buffer:
        """Bytes (uint8) on the device, aligned for vector access, zero from there in the stream.

        ``BackendError`` if there is no memory left, not even in frameworks' caches.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """How much memory nobody uses, and no framework keeps for later."""

    @abstractmethod
    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of the host that can be copied from and to without waiting."""

    @abstractmethod
    def borrow(self, address: int, nbytes: int, owner: object) -> Buffer:
        """Memory of this device that a framework has taken, as bytes; ``owner`` is kept with it."""

    @abstractmethod
    def address(self, buffer: Buffer) -> int:
        """Where a buffer lies."""

    @abstractmethod
    def copy(self, target: Buffer, source: Buffer, stream: int) -> None:
        """Enqueue a copy of bytes; either side may be pinned memory of the host."""

    @abstractmethod
    def pack_table(
        self,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        dtype: str,
        stream: int,
        tensor_dtype: str = "",
        unpack_stream: int | None = None,
    ) -> SlotTable:
        """A table of a buffer's slots that packs on a stream, whose memory it is, and unpacks on
        the same or another one. It casts if types differ; ``ValueError`` if it cannot."""

    @abstractmethod
    def use(self) -> None:
        """Let what foreign libraries do in the calling thread happen on this device."""

    @abstractmethod
    def is_capturing(self, stream: int) -> bool:
        """Whether work enqueued on a stream goes into a graph instead of running."""

    @abstractmethod
    def trim(self) -> None:
        """Free memory that is kept for later; may wait for the device."""

    annotates = False
    """Whether profilers are shown names, which costs some microseconds per group."""

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Shows what is enqueued within it under a name in the profiler's timeline, if asked to."""
        return self._annotation(name) if self.annotates else _UNSEEN

    @abstractmethod
    def _annotation(self, name: str) -> AbstractContextManager[object]:
        """Shows what is enqueued within it under a name."""

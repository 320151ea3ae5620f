"""The interface between the runtime and one accelerator.

All work on a device is enqueued on *streams*, and runs in order within each. An *event* marks a
place in a stream; another stream can wait for it. The host only enqueues: no method here waits for
the device. Streams are raw handles, so that any framework's can be named; a device subclasses
:class:`Event`. Implementations: ``wfbp.cuda.cupy_device``, and the tests' software device (streams
are threads).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.comm.arrays import Buffer
from wfbp.comm.memory import Event, SlotTable


class Device(ABC):
    """One accelerator. Any thread may call every method; all return at once. ``name`` is for
    messages; ``identity`` is unique among devices of all hosts."""

    name: str
    identity: str
    where = ""
    """This rank in messages, as in "rank 1 of 4"; set by the runtime."""

    logged_reason = ""
    """The last logged reason for messages through the host."""

    @abstractmethod
    def nccl(self) -> Any:
        """This device's NCCL bindings, as ``cupy.cuda.nccl``; ``ImportError`` if there are none."""

    @abstractmethod
    def current_stream(self) -> int:
        """The stream on which the calling thread's work is enqueued."""

    @abstractmethod
    def new_stream(self) -> int:
        """A stream ordered with others only by events; it lives as long as the device."""

    @abstractmethod
    def record(self, stream: int, timed: bool = False) -> Event:
        """An event after all work that is enqueued on a stream."""

    @abstractmethod
    def wait(self, stream: int, event: Event) -> None:
        """Make later work on a stream wait for an event."""

    @abstractmethod
    def done(self, event: Event) -> bool:
        """Whether all work before an event has run; ``BackendError`` if some failed."""

    @abstractmethod
    def seconds(self, start: Event, end: Event) -> float:
        """Device time between two timed events that are done; negative if ``end`` was first."""

    @abstractmethod
    def zeros(self, nbytes: int, stream: int) -> Buffer:
        """Aligned device bytes (uint8), zero from this point of the stream on. ``BackendError`` if
        memory is exhausted, frameworks' caches included."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Unused memory that no framework caches."""

    @abstractmethod
    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host bytes that can be copied from and to without waiting."""

    @abstractmethod
    def address(self, buffer: Buffer) -> int:
        """A buffer's address."""

    @abstractmethod
    def copy(self, target: Buffer, source: Buffer, stream: int) -> None:
        """Enqueue a copy of bytes; either side may be pinned host memory."""

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
        """A table of a buffer's slots that packs on ``stream``, the owner of its memory, and
        unpacks on the same or another one. It casts if types differ; ``ValueError`` if it
        cannot."""

    @abstractmethod
    def use(self) -> None:
        """Select this device for foreign libraries in the calling thread."""

    @abstractmethod
    def is_capturing(self, stream: int) -> bool:
        """Whether work enqueued on a stream is captured in a graph instead of running."""

    @abstractmethod
    def trim(self) -> None:
        """Free cached memory; may wait for the device."""

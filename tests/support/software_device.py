"""A device made of threads: its streams run later than they are given work, and break what is used
too early.

Memory is NumPy's. Each stream is a thread with a queue; before every operation it may dawdle, and
what an operation writes to is filled with garbage before the operation runs, so that whoever reads
without having waited finds wrong numbers, and not by chance the right ones.

Stream ``HOST`` is no thread but whoever uses it: what is "enqueued" there has happened, and waiting
there blocks. With it a framework that computes on the host can play the consumer.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from wfbp import native
from wfbp.comm.arrays import Buffer
from wfbp.comm.device.device import Device
from wfbp.comm.memory import Event
from wfbp.core.types import item_bytes
from wfbp.errors import BackendError

HOST = 0
GARBAGE = 0xE7
"""As a byte; its floats are huge and negative."""

_LIMIT_S = 60.0


class SoftwareEvent(Event):
    """Happened or not, when, and after what."""

    def __init__(self, timed: bool = True) -> None:
        self._done = threading.Event()
        self.timed = timed
        self.at_s = 0.0
        self.error: BaseException | None = None

    def happen(self) -> None:
        self.at_s = time.perf_counter()
        self._done.set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def soon(self) -> bool:
        return self._done.wait(1.0)

    def await_it(self) -> None:
        assert self._done.wait(_LIMIT_S), "an event that never happens was waited for"


class _Stream:
    """One thread that does what it is told, in order."""

    def __init__(self, dawdle: Callable[[], None]) -> None:
        self.work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._dawdle = dawdle
        threading.Thread(target=self._run, daemon=True, name="software-stream").start()

    def _run(self) -> None:
        while True:
            act = self.work.get()
            try:
                self._dawdle()
                act()
            except BaseException as error:
                self.error = self.error or error


class SoftwareDevice(Device):
    """See the module.

    Args:
        seed: of how long operations dawdle.
        most_s: the longest that one does; most do not.
        consumer: what :meth:`current_stream` is where a thread has not chosen another.
    """

    def __init__(self, seed: int = 0, most_s: float = 0.0, consumer: int = HOST) -> None:
        self._chance = random.Random(seed)
        self._most_s = most_s
        self._streams: dict[int, _Stream] = {}
        self._handles = itertools.count(1)
        self._here = threading.local()
        self._free: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
        self._consumer = consumer
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.name = "the software device"
        self.identity = f"software {id(self)}"
        self.library: Any = None
        self.room_bytes = 1 << 40
        self.capturing: set[int] = set()
        """Streams on which a graph is captured."""

    def nccl(self) -> Any:
        if self.library is None:
            raise ImportError("there is no NCCL in software")
        return self.library

    # What the runtime calls.

    def current_stream(self) -> int:
        stream: int = getattr(self._here, "stream", self._consumer)
        return stream

    def new_stream(self) -> int:
        with self._lock:
            handle = next(self._handles)
            self._streams[handle] = _Stream(self._dawdle)
        return handle

    def record(self, stream: int, timed: bool = False) -> SoftwareEvent:
        self.calls["timed record" if timed else "record"] += 1
        event = SoftwareEvent(timed)
        if stream == HOST:
            event.happen()
        else:
            work = self._streams[stream]

            def happen() -> None:
                event.error = work.error
                event.happen()

            work.work.put(happen)
        return event

    def wait(self, stream: int, event: SoftwareEvent) -> None:
        self.calls["wait"] += 1
        self.enqueue(stream, event.await_it)

    def done(self, event: SoftwareEvent) -> bool:
        self.calls["done"] += 1
        if event.done and event.error is not None:
            raise BackendError(f"the software device failed: {event.error}") from event.error
        if not event.done:
            time.sleep(0)  # who spins must let the streams have the interpreter
        return event.done

    def seconds(self, start: SoftwareEvent, end: SoftwareEvent) -> float:
        assert start.done
        assert end.done
        assert start.timed
        assert end.timed
        return end.at_s - start.at_s

    def zeros(self, nbytes: int, stream: int) -> Buffer:
        free = self._free[stream, nbytes]
        pooled = _Pooled(free.pop() if free else np.zeros(nbytes + 64, np.uint8), free)
        start = -pooled.raw.__array_interface__["data"][0] % 64
        data = np.asarray(pooled)[start : start + nbytes]
        self.write(stream, [data], lambda: data.fill(0))
        return data

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def trim(self) -> None:
        self.calls["trim"] += 1
        for free in self._free.values():
            free.clear()

    def free_bytes(self) -> int:
        return self.room_bytes

    def pinned(self, nbytes: int) -> Buffer:
        return np.full(nbytes, GARBAGE, np.uint8)

    def address(self, buffer: Buffer) -> int:
        return int(buffer.__array_interface__["data"][0])

    def copy(self, target: Buffer, source: Buffer, stream: int) -> None:
        assert target.nbytes == source.nbytes
        self.write(stream, [target], lambda: np.copyto(target, source.view(target.dtype)))

    def pack_table(
        self,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        dtype: str,
        stream: int,
        tensor_dtype: str = "",
        unpack_stream: int | None = None,
    ) -> SoftwareTable:
        return SoftwareTable(
            self, buffer, offsets, nbytes, dtype, stream, tensor_dtype, unpack_stream
        )

    def use(self) -> None:
        self.calls["use"] += 1

    # What tests and the fake library call.

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Let this thread's work go to a stream."""
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def enqueue(self, stream: int, act: Callable[[], None]) -> None:
        """Have something done in its turn."""
        if stream == HOST:
            act()
        else:
            self._streams[stream].work.put(act)

    def write(self, stream: int, targets: Sequence[Buffer], act: Callable[[], None]) -> None:
        """Enqueue what writes to memory and does not read what is there."""

        def run() -> None:
            for target in targets:
                target.view(np.uint8).fill(GARBAGE)
            self._dawdle()
            act()

        self.enqueue(stream, run)

    def update(self, stream: int, target: Buffer, act: Callable[[Buffer], None]) -> None:
        """Enqueue what changes memory in place: ``act`` gets a copy, which then replaces it."""

        def run() -> None:
            copy = target.copy()
            target.view(np.uint8).fill(GARBAGE)
            self._dawdle()
            act(copy)
            np.copyto(target, copy)

        self.enqueue(stream, run)

    def drain(self) -> None:
        """Wait until all that was enqueued has run; raise what failed."""
        events = [self.record(stream) for stream in list(self._streams)]
        for event in events:
            event.await_it()
            self.done(event)

    def _dawdle(self) -> None:
        with self._lock:
            wait_s = self._chance.random() * self._most_s if self._chance.random() < 0.4 else 0.0
        if wait_s:
            time.sleep(wait_s)


class _Pooled:
    """Memory that is given out again for the same stream when nobody holds it, as CuPy's pool does.

    What was enqueued before on that stream may still use it; it comes before the next owner.
    """

    def __init__(self, raw: Buffer, free: list[Buffer]) -> None:
        self.raw = raw
        self._free = free
        self.__array_interface__ = raw.__array_interface__

    def __del__(self) -> None:
        self._free.append(self.raw)


class SoftwareTable:
    """A pack table whose copies run in their turn."""

    def __init__(
        self,
        device: SoftwareDevice,
        buffer: Buffer,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        dtype: str,
        stream: int,
        tensor_dtype: str = "",
        unpack_stream: int | None = None,
    ) -> None:
        self._unpack_stream = stream if unpack_stream is None else unpack_stream
        self._tensor_dtype = tensor_dtype or dtype
        self._device = device
        self._buffer = buffer
        self._offsets, self._nbytes = list(offsets), list(nbytes)
        self._dtype = dtype
        self._stream = stream
        self.pointers: Any = np.zeros(len(self._offsets), np.int64)

    def pack(self) -> None:
        self._device.calls["pack"] += 1
        table = self._table()

        def run() -> None:
            base = self._device.address(self._buffer)
            for offset, size, pointer in zip(
                self._offsets, self._nbytes, table.pointers.tolist(), strict=True
            ):
                if pointer != base + offset:
                    self._buffer[offset : offset + size] = GARBAGE
            self._device._dawdle()
            table.pack()

        self._device.enqueue(self._stream, run)

    def unpack(self) -> None:
        self._device.calls["unpack"] += 1
        table = self._table()
        ratio = item_bytes(self._tensor_dtype) // item_bytes(self._dtype)

        def run() -> None:
            base = self._device.address(self._buffer)
            for offset, size, pointer in zip(
                self._offsets, self._nbytes, table.pointers.tolist(), strict=True
            ):
                if size and pointer and pointer != base + offset:
                    memory(pointer, size * ratio).fill(GARBAGE)
            self._device._dawdle()
            table.unpack()

        self._device.enqueue(self._unpack_stream, run)

    def _table(self) -> Any:
        """The table with the addresses of now."""
        table = native.PackTable(
            self._buffer,
            np.asarray(self._offsets, np.int64),
            np.asarray(self._nbytes, np.int64),
            self._dtype,
            self._tensor_dtype,
        )
        table.pointers[:] = self.pointers
        return table


def memory(address: int, nbytes: int) -> Buffer:
    """The bytes at an address."""
    if not nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), np.uint8)

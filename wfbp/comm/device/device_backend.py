"""Backends whose buffers are on a device: the common part of NCCL and staging through the host."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from wfbp.comm.arrays import Buffer, Segment, block_ranges
from wfbp.comm.backend import PROBE_LIMIT, Backend, Finished, HostBackend, Work
from wfbp.comm.device.device import Device
from wfbp.comm.device.launch_order import LaunchOrder
from wfbp.comm.memory import Event
from wfbp.core.types import Op

_NAP_S = 10e-6
_LONG_NAP_S = 100e-6

_LARGEST_PROBE_BYTES = 128 << 20
_PART_OF_FREE = 4
"""A measured message takes at most 1/4 of the free memory, but is as large as on the host."""


class DeviceWork(Work[None]):
    """A collective on ``data``, bytes of a device; ``test()`` is True once it is complete there.
    ``beside``: a message on the host that belongs to it."""

    def __init__(self, backend: DeviceBackend, data: Buffer) -> None:
        self._backend = backend
        self.data = data
        self.nbytes = data.nbytes
        self.beside: Work[None] = Finished(None)
        self.end: Event | None = None
        """A place in the backend's stream after the collective, once it is enqueued."""

    def conclude(self) -> None:
        """Everything is enqueued on the backend's stream."""
        # Polled instead of synchronized: the host must not block while it holds the progress lock.
        self.end = self._backend.device.record(self._backend.stream)

    @property
    def activity(self) -> int:
        return self._backend.activity + self.beside.activity + (self.end is not None)

    def issued(self) -> bool:
        """Advance the host's part; True once later work on the stream finds the result. After
        ``BackendError``, because the library below failed, the work is over."""
        if self.end is None:
            self._backend.progress()
        return self.beside.test() and self.end is not None

    def test(self) -> bool:
        issued = self.issued()
        if self.end is None:
            if self._backend.order is not None:
                self._backend.order.advance_others()
            return False
        if self._backend.device.done(self.end):
            return issued
        self._backend.check()
        return False


class DeviceBackend(Backend):
    """A backend of device buffers; every collective returns a :class:`DeviceWork`. Collectives are
    enqueued in order on :attr:`stream`, and read a buffer when the stream reaches them. Payloads
    use ``host``, a backend over the same ranks for this object alone."""

    order: LaunchOrder | None = None
    """Decides when a collective's turn among all lanes has come; this backend is its ``lane``."""
    lane = 0

    def __init__(self, device: Device, host: HostBackend) -> None:
        self.device = device
        self.host = host
        self.stream = device.new_stream()
        self.packing = device.new_stream()
        """The stream for work before collectives: it does not wait for those under way."""
        self._packed: Event | None = None
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size = host.local_rank, host.local_size

    def probe_limit(self) -> int:
        part_of_free = self.device.free_bytes() // _PART_OF_FREE
        return max(PROBE_LIMIT, min(_LARGEST_PROBE_BYTES, part_of_free))

    def trim(self) -> None:
        self.device.trim()

    def follow_packing(self) -> None:
        """Order the next collective after what is enqueued on :attr:`packing` now."""
        self._packed = self.device.record(self.packing)

    def settles(self, timeout_s: float | None = None) -> bool:
        """Wait until the device has done all enqueued work; False if time runs out."""
        last, begun_s = self.device.record(self.stream), time.monotonic()
        while not self.device.done(last):
            if timeout_s is not None and time.monotonic() - begun_s > timeout_s:
                return False
            time.sleep(_LONG_NAP_S)
        return True

    def stopwatch(self) -> Callable[[], float]:
        """Measure by events: device time, without the host's delay in noticing the end."""
        device, stream = self.device, self.stream
        begin = device.record(stream, timed=True)

        def stop() -> float:
            end = device.record(stream, timed=True)
            while not device.done(end):  # all is complete, so that is soon
                time.sleep(_NAP_S)
            return device.seconds(begin, end)

        return stop

    def progress(self) -> None:
        """Advance the host's part of all collectives."""
        if self.order is not None:
            self.order.progress()

    @abstractmethod
    def check(self) -> None:
        """Raise ``BackendError`` if a collective has failed that no work reports."""

    @abstractmethod
    def give_up(self) -> None:
        """End collectives that wait for other ranks, unfinished, so that the device is free."""

    @abstractmethod
    def _all_reduce(self, work: DeviceWork, dtype: str, op: Op) -> None:
        """Combine at least one byte; conclude the work once all is enqueued, now or later."""

    @abstractmethod
    def _reduce_scatter(self, work: DeviceWork, blocks: Blocks, dtype: str, op: Op) -> None:
        """Combine adjacent blocks of bytes."""

    @abstractmethod
    def _all_gather(self, work: DeviceWork, blocks: Blocks) -> None:
        """Fill adjacent blocks of bytes."""

    def zeros(self, nbytes: int) -> Buffer:
        return self.device.zeros(nbytes, self.stream)

    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Segment] = ()
    ) -> DeviceWork:
        assert not segments, "tensors on devices are packed"
        return self._launch(buffer, lambda work: self._all_reduce(work, dtype, op))

    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Segment] = (),
    ) -> DeviceWork:
        assert not segments, "tensors on devices are packed"
        blocks = Blocks.of(self.size, buffer.nbytes, tuple(counts), dtype)
        return self._launch(buffer, lambda work: self._reduce_scatter(work, blocks, dtype, op))

    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> DeviceWork:
        assert not segments, "tensors on devices are packed"
        blocks = Blocks.of(self.size, buffer.nbytes, tuple(counts), "uint8")
        return self._launch(buffer, lambda work: self._all_gather(work, blocks))

    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        return self.host.all_gather_bytes(payload)

    def _launch(self, buffer: Buffer, start: Callable[[DeviceWork], None]) -> DeviceWork:
        """Start a collective after its packing, when its turn has come."""
        work = DeviceWork(self, buffer if buffer.dtype == np.uint8 else buffer.view(np.uint8))
        packed, self._packed = self._packed, None

        def launch() -> None:
            order = self.order
            if order is not None and order.last is not None and order.last[0] != self.lane:
                self.device.wait(self.stream, order.last[1])
            if packed is not None:
                self.device.wait(self.stream, packed)
            if work.nbytes:
                start(work)
            else:
                work.conclude()
            if order is not None:
                assert work.end is not None
                order.last = self.lane, work.end

        if self.order is None:
            launch()
        else:
            self.order.launch(self.lane, launch)
        return work


@dataclass(frozen=True, slots=True)
class Blocks:
    """First and last byte of each rank's block of a buffer."""

    # Numbers, not slices: CuPy takes microseconds to slice, for every rank in every step.
    ranges: tuple[tuple[int, int], ...]
    are_equal: bool

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(size: int, nbytes: int, counts: tuple[int, ...], dtype: str) -> Blocks:
        """The blocks of a buffer of ``nbytes``; ``ValueError`` if a size does not fit."""
        block_ranges(size, nbytes, counts, dtype)
        return Blocks(tuple(block_ranges(size, nbytes, counts)), len(set(counts)) <= 1)

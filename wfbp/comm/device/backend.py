"""Backends whose buffers are on a device: the common part of NCCL and staging through the host."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from wfbp.comm.arrays import Buffer, check_counts
from wfbp.comm.backend import PROBE_LIMIT, Backend, HostBackend, Segment, Work
from wfbp.comm.device.device import Device, Event
from wfbp.core.types import Op

_NAP_S = 10e-6
_LONG_NAP_S = 100e-6

_LARGEST_PROBE_BYTES = 128 << 20
_PART_OF_FREE = 4
"""A measured message takes at most 1/4 of the free memory, but is as large as on the host."""


class DeviceWork(Work[None]):
    """A collective on a device's buffer; ``test()`` is True once it is complete on the device."""

    @abstractmethod
    def issued(self) -> bool:
        """Advance the host's part; True once later work on the stream finds the result. After
        ``BackendError``, because the library below failed, the work is over."""


class DeviceBackend(Backend):
    """A backend of device buffers; every collective returns a :class:`DeviceWork`. Collectives are
    enqueued in order on :attr:`stream`, and read a buffer when the stream reaches them. Payloads
    use ``host``, a backend over the same ranks for this object alone."""

    def __init__(self, device: Device, host: HostBackend) -> None:
        self.device = device
        self.host = host
        self.stream = device.new_stream()
        self._packed: Event | None = None
        self.in_order: Callable[[Callable[[], DeviceWork], int], DeviceWork] | None = None
        """Starts a collective of so many bytes when its turn among all lanes has come."""
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size = host.local_rank, host.local_size

    @cached_property
    def packing(self) -> int:
        """The stream for work before collectives: it does not wait for those under way."""
        return self.device.new_stream()

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

    @abstractmethod
    def check(self) -> None:
        """Raise ``BackendError`` if a collective has failed that no work reports."""

    @abstractmethod
    def give_up(self) -> None:
        """End collectives that wait for other ranks, unfinished, so that the device is free."""

    @abstractmethod
    def _all_reduce(self, data: Buffer, dtype: str, op: Op) -> DeviceWork:
        """Combine at least one byte among at least two ranks."""

    @abstractmethod
    def _reduce_scatter(self, data: Buffer, blocks: Blocks, dtype: str, op: Op) -> DeviceWork:
        """Combine adjacent blocks of bytes."""

    @abstractmethod
    def _all_gather(self, data: Buffer, blocks: Blocks) -> DeviceWork:
        """Fill adjacent blocks of bytes."""

    @abstractmethod
    def _nothing(self) -> DeviceWork:
        """The work of an empty collective."""

    def zeros(self, nbytes: int) -> Buffer:
        return self.device.zeros(nbytes, self.stream)

    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Segment] = ()
    ) -> DeviceWork:
        assert not segments, "tensors on devices are packed"
        data = raw(buffer)
        return self._launch(lambda: self._all_reduce(data, dtype, op), data.nbytes)

    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Segment] = (),
    ) -> DeviceWork:
        assert not segments, "tensors on devices are packed"
        data = raw(buffer)
        blocks = Blocks.of(self.size, data.nbytes, tuple(counts), dtype)
        return self._launch(lambda: self._reduce_scatter(data, blocks, dtype, op), blocks.total)

    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> DeviceWork:
        assert not segments, "tensors on devices are packed"
        data = raw(buffer)
        blocks = Blocks.of(self.size, data.nbytes, tuple(counts), "uint8")
        return self._launch(lambda: self._all_gather(data, blocks), blocks.total)

    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        return self.host.all_gather_bytes(payload)

    def _launch(self, start: Callable[[], DeviceWork], nbytes: int) -> DeviceWork:
        """Start a collective after its packing, when its turn has come."""
        packed, self._packed = self._packed, None

        def launch() -> DeviceWork:
            if packed is not None:
                self.device.wait(self.stream, packed)
            return start() if nbytes else self._nothing()

        return launch() if self.in_order is None else self.in_order(launch, nbytes)


def raw(buffer: Buffer) -> Buffer:
    """A device buffer's bytes."""
    return buffer if buffer.dtype == np.uint8 else buffer.view(np.uint8)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Bytes and first byte of each rank's block of a buffer."""

    # Numbers, not slices: CuPy takes microseconds to slice, for every rank in every step.
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    total: int
    are_equal: bool

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(size: int, nbytes: int, counts: tuple[int, ...], dtype: str) -> Blocks:
        """The blocks of a buffer of ``nbytes``; ``ValueError`` if a size does not fit."""
        check_counts(size, nbytes, counts, dtype)
        starts = tuple(accumulate(counts, initial=0))
        return Blocks(counts, starts[:-1], starts[-1], len(set(counts)) <= 1)

    def cut(self, data: Buffer) -> list[Buffer]:
        """One block of bytes per rank."""
        return [data[a : a + n] for a, n in zip(self.starts, self.counts, strict=True)]

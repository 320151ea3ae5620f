"""Backends whose buffers lie on a device: what NCCL and staging through the host have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Work
from wfbp.comm.buffers import check_counts
from wfbp.comm.device.device import Device
from wfbp.core.types import Op, item_bytes


class DeviceWork(Work[None]):
    """A collective on a device's buffer.

    ``issued()`` is True once nothing is left for the host to do: what the stream of its backend is
    given from there on finds the result. ``test()`` is True once it is complete on the device.
    """

    @abstractmethod
    def issued(self) -> bool:
        """Move the host's part on, without blocking; True once it is over.

        Raises:
            BackendError: the library below failed; the work is over.
        """

    @abstractmethod
    def then(self, target: Buffer, source: Buffer) -> None:
        """Have bytes copied behind it."""

    @property
    def result(self) -> None:
        return None


class DeviceBackend(Backend):
    """A backend whose buffers lie on a device; every collective returns a :class:`DeviceWork`.

    Collectives are enqueued on :attr:`stream`, in order: a buffer travels as the stream finds it
    when it gets there. What has no buffer (payloads, notices) goes through ``host``.

    Args:
        device: where buffers lie.
        host: a backend over the same ranks, used by nobody else.
    """

    def __init__(self, device: Device, host: Backend) -> None:
        self.device = device
        self.host = host
        self.stream = device.new_stream()
        self.rank, self.size = host.rank, host.size
        self.local_rank, self.local_size = host.local_rank, host.local_size

    @abstractmethod
    def check(self) -> None:
        """Raise what has gone wrong since, where no work would tell.

        Raises:
            BackendError: a collective failed.
        """

    @abstractmethod
    def give_up(self) -> None:
        """Let collectives that wait for other ranks end, unfinished, so that the device is free."""

    @abstractmethod
    def _all_reduce(self, data: Buffer, dtype: str, op: Op) -> DeviceWork:
        """Combine some bytes, at least one, among at least two ranks."""

    @abstractmethod
    def _reduce_scatter(self, blocks: Sequence[Buffer], dtype: str, op: Op) -> DeviceWork:
        """Combine adjacent blocks of bytes."""

    @abstractmethod
    def _broadcast(self, data: Buffer, root: int) -> DeviceWork:
        """Copy the root's bytes."""

    @abstractmethod
    def _all_gather(self, blocks: Sequence[Buffer]) -> DeviceWork:
        """Fill adjacent blocks of bytes."""

    @abstractmethod
    def _nothing(self) -> DeviceWork:
        """The work of a collective for which nothing has to travel."""

    def _bring(self, place: Buffer, part: Buffer) -> None:
        """Copy a part into the buffer, unless it lies there."""
        if self.device.address(place) != self.device.address(part):
            self.device.copy(place, part, self.stream)

    def zeros(self, nbytes: int) -> Buffer:
        return self.device.zeros(nbytes, self.stream)

    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Any] = ()
    ) -> DeviceWork:
        data = raw(buffer, dtype)
        for start, source, *_ in segments:
            piece = raw(source, dtype, writeable=False)
            self._bring(data[start : start + piece.size], piece)
        if self.size == 1 or not data.size:
            return self._nothing()
        return self._all_reduce(data, dtype, op)

    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Any] = (),
    ) -> DeviceWork:
        blocks = cut(raw(buffer, dtype), counts, self.size, dtype)
        for _, place, part in _parts(blocks, segments, dtype, writeable=False):
            self._bring(place, part)
        if self.size == 1 or not sum(counts):
            return self._nothing()
        return self._reduce_scatter(blocks, dtype, op)

    def broadcast(self, buffer: Buffer, root: int) -> DeviceWork:
        data = raw(buffer, None)
        if self.size == 1 or not data.size:
            return self._nothing()
        return self._broadcast(data, root)

    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Any] = ()
    ) -> DeviceWork:
        blocks = cut(raw(buffer, None), counts, self.size, "uint8")
        parts = list(_parts(blocks, segments, "uint8", writeable=True))
        for rank, place, part in parts:
            if rank == self.rank:
                self._bring(place, part)
        if self.size == 1 or not sum(counts):
            return self._nothing()
        work = self._all_gather(blocks)
        for rank, place, part in parts:
            if rank != self.rank and self.device.address(place) != self.device.address(part):
                work.then(part, place)
        return work

    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        return self.host.all_gather_bytes(payload)

    def send_notice(self, payload: bytes) -> None:
        self.host.send_notice(payload)

    def poll_notices(self) -> list[tuple[int, bytes]]:
        return self.host.poll_notices()

    def abort(self, code: int) -> None:
        self.host.abort(code)


def raw(buffer: Buffer, dtype: str | None, writeable: bool = True) -> Buffer:
    """The bytes of a buffer on a device; ``dtype`` is what they are, if they are to be reduced.

    Raises:
        ValueError: it is not one-dimensional, contiguous and writeable, or holds no whole number
            of elements.
    """
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(
            "a buffer must be one-dimensional and contiguous; "
            f"found shape {buffer.shape}, strides {buffer.strides}"
        )
    if writeable and not getattr(buffer.flags, "writeable", True):
        raise ValueError("a buffer that receives must be writeable")
    if dtype is not None and buffer.nbytes % item_bytes(dtype):
        raise ValueError(f"a buffer of {buffer.nbytes} bytes holds no whole number of {dtype}")
    return buffer.view(np.uint8)


def cut(data: Buffer, counts: Sequence[int], size: int, dtype: str) -> list[Buffer]:
    """One block of bytes per rank.

    Raises:
        ValueError: a size does not fit; the message names it.
    """
    check_counts(size, data.nbytes, counts, dtype)
    ends = list(accumulate(counts))
    return [data[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _parts(
    blocks: Sequence[Buffer], segments: Sequence[Any], dtype: str, writeable: bool
) -> list[tuple[int, Buffer, Buffer]]:
    """Of every segment and rank: the rank, its place in the rank's block, its data."""
    found = []
    for start, source, counts, _ in segments:
        parts = cut(raw(source, dtype, writeable), counts, len(blocks), dtype)
        for rank, (block, part) in enumerate(zip(blocks, parts, strict=True)):
            if part.size:
                found.append((rank, block[start : start + part.size], part))
    return found

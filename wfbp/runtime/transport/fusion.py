"""Fusion buffers: where the tensors of each group lie while they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wfbp import native
from wfbp.comm.backend import Backend, Buffer, Segment, Work
from wfbp.comm.pages import zeroed
from wfbp.core.plan import ALIGNMENT_BYTES, Plan
from wfbp.core.types import Op, item_bytes
from wfbp.runtime.steps import Step
from wfbp.runtime.transport.direct import BufferLayout, memory_at
from wfbp.runtime.transport.flags import FlagCodec, GroupFlags

_STORAGE = {"bfloat16": np.dtype(np.uint16)}
_LINE_BYTES = 64


class _Storage:
    """Memory in which a group's tensors lie, with its flags behind them."""

    def __init__(
        self, offsets: Sequence[int], nbytes: Sequence[int], flags: int, dtype: str, end: int,
        carrier: Backend | None,
    ) -> None:  # fmt: skip
        width = item_bytes(dtype)
        self.bytes = aligned_bytes(end + flags * width, carrier)
        self.buffer: Buffer = self.bytes.view(storage_dtype(dtype))
        self.tail = self.buffer[end // width :]
        self.address: int = self.bytes.__array_interface__["data"][0]
        self.delivers = carrier is not None and carrier.delivers(self.buffer)
        self.slots = frozenset(
            self.address + start for start, size in zip(offsets, nbytes, strict=True) if size
        )
        self.table = native.PackTable(
            self.bytes,
            np.asarray(offsets, dtype=np.int64),
            np.asarray(nbytes, dtype=np.int64),
            dtype,
        )


class FusionBuffer:
    """Storage of one all-reduced group, and the packing into it.

    Used by one thread at a time; the views of its tensors belong to the training thread between
    the completion of the group and the next step's first gradient.

    Results never come to where a gradient of this rank lies: it may still grow, and be sent again.
    A program that accumulates into what the step before has brought makes the buffer go to other
    storage, and back again in the step behind.

    Args:
        plan: what to send.
        group: index of the group whose storage this is.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        size: number of ranks.
        zero_copy_min_bytes: tensors of at least this size are not packed.
        carrier: that will be asked to send, where it is known.

    Attributes:
        num_moves: how often the buffer has gone to other storage, so that slots lie elsewhere.
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        op: Op,
        size: int,
        zero_copy_min_bytes: int,
        carrier: Backend | None = None,
    ) -> None:
        self.dtype = plan.dtype(group)
        self._op = op
        self._flags = FlagCodec(plan, group)
        self._members = plan.groups[group].tensors
        self._nbytes = [plan.tensors[k].nbytes for k in self._members]
        buffer_layout = BufferLayout(self._nbytes, self._nbytes, zero_copy_min_bytes)
        self._offsets = buffer_layout.offsets
        self._large = buffer_layout.large
        self._segments: list[Segment] = []
        self._end = -(-buffer_layout.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._carrier = carrier
        self._delivered: set[int] = set()
        self.num_moves = 0
        self._storage = self._made()
        self._other: _Storage | None = None

    def _made(self) -> _Storage:
        return _Storage(
            self._offsets, self._nbytes, self._flags.count, self.dtype, self._end, self._carrier
        )

    @property
    def buffer(self) -> Buffer:
        """What is sent: the tensors and the flags, as elements."""
        return self._storage.buffer

    def slot(self, position: int) -> Buffer:
        """The bytes of the group's tensor at ``position``, as uint8."""
        start = self._offsets[position]
        return self._storage.bytes[start : start + self._nbytes[position]]

    def _make_way(self, sources: Sequence[int]) -> None:
        """Go to storage in which none of these gradients lies."""
        other = self._other
        if other is None or not other.slots.isdisjoint(sources):
            other = self._made()  # gradients in the one before keep that alive
        self._other, self._storage = self._storage, other
        self.num_moves += 1

    def pack(self, step: Step) -> None:
        """Copy small tensors, and note where the large ones lie; zeros for what is absent.

        Memory without an owner may be freed where a step fails. It is copied too, unless the
        backend would not read it afterwards; then results go where they are wanted, if that is
        known by now.
        """
        sources = [step.addresses[k] for k in self._members]
        if not self._storage.slots.isdisjoint(sources):
            self._make_way(sources)
        storage = self._storage
        flags = self._flags.values(sources, step.requested, step.number, step.discards)
        self._delivered.clear()
        for position in self._large:
            k = self._members[position]
            offset, nbytes = self._offsets[position], self._nbytes[position]
            slot = storage.address + offset
            data = self.slot(position)
            owner = step.owners[k]
            if sources[position] and (storage.delivers or owner is not None):
                data = memory_at(sources[position], nbytes, owner)
                sources[position] = slot
            result = None
            if storage.delivers and step.targets and step.targets[k]:
                result = memory_at(step.targets[k], nbytes, None)
                self._delivered.add(k)
            self._segments.append(Segment(offset, data, (), result))
        storage.table.pointers[:] = sources
        storage.table.pack()
        storage.tail[:] = flags

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy the tensors to these addresses, indexed by tensor; 0: not that one.

        Those that the backend has delivered are there already.
        """
        table = self._storage.table
        table.pointers[:] = [0 if k in self._delivered else addresses[k] for k in self._members]
        table.unpack()

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it; called once after each :meth:`pack`."""
        segments, self._segments = self._segments, []
        return backend.all_reduce(self.buffer, self.dtype, self._op, segments)

    def arrived(self, step: int) -> GroupFlags:
        """Read the flags of the reduced message.

        Args:
            step: this rank's step number.
        """
        return self._flags.read(self._storage.tail, step)


def aligned_bytes(size: int, carrier: Backend | None = None) -> Buffer:
    """Zeroed bytes that start at a cache line, where the carrier wants them."""
    size_of_all = size + _LINE_BYTES
    raw = zeroed(size_of_all) if carrier is None else carrier.zeros(size_of_all)
    start = -raw.__array_interface__["data"][0] % _LINE_BYTES
    return raw[start : start + size]


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds elements of ``dtype`` (uint16 for bfloat16)."""
    return _STORAGE.get(dtype) or np.dtype(dtype)

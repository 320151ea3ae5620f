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
from wfbp.runtime.direct import Arrangement, memory
from wfbp.runtime.flags import Arrival, Flags
from wfbp.runtime.steps import Step

_STORAGE = {"bfloat16": np.dtype(np.uint16)}
_LINE_BYTES = 64


class FusionBuffer:
    """Storage of one all-reduced group, and the packing into it.

    Used by one thread at a time; the views of its tensors belong to the training thread between
    the completion of the group and the next step's first gradient.

    Args:
        plan: what to send.
        group: index of the group whose storage this is.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        size: number of ranks.
        direct_bytes: tensors of at least this size are not packed.
        carrier: that will be asked to send, where it is known.
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        op: Op,
        size: int,
        direct_bytes: int,
        carrier: Backend | None = None,
    ) -> None:
        self.dtype = plan.dtype(group)
        self._op = op
        self._flags = Flags(plan, group)
        self._members = plan.groups[group].tensors
        self._nbytes = [plan.tensors[k].nbytes for k in self._members]
        arrangement = Arrangement(self._nbytes, self._nbytes, direct_bytes)
        self._offsets = arrangement.offsets
        self._large = arrangement.large
        self._segments: list[Segment] = []
        width = item_bytes(self.dtype)
        data = -(-arrangement.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._bytes = aligned_bytes(data + self._flags.count * width, carrier)
        self.buffer: Buffer = self._bytes.view(storage_dtype(self.dtype))
        self._delivers = carrier is not None and carrier.delivers(self.buffer)
        self._delivered: set[int] = set()
        self._address: int = self._bytes.__array_interface__["data"][0]
        self._tail = self.buffer[data // width :]
        self._table = native.PackTable(
            self._bytes,
            np.asarray(self._offsets, dtype=np.int64),
            np.asarray(self._nbytes, dtype=np.int64),
            self.dtype,
        )

    def slot(self, position: int) -> Buffer:
        """The bytes of the group's tensor at ``position``, as uint8."""
        start = self._offsets[position]
        return self._bytes[start : start + self._nbytes[position]]

    def pack(self, step: Step) -> None:
        """Copy small tensors, and note where the large ones lie; zeros for what is absent.

        Memory without an owner may be freed where a step fails. It is copied too, unless the
        backend would not read it afterwards; then results go where they are wanted, if that is
        known by now.
        """
        sources = [step.addresses[k] for k in self._members]
        flags = self._flags.values(sources, step.requested, step.number, step.discards)
        self._delivered.clear()
        for position in self._large:
            k = self._members[position]
            offset, nbytes = self._offsets[position], self._nbytes[position]
            slot = self._address + offset
            data = self.slot(position)
            owner = step.owners[k]
            if sources[position] not in (0, slot) and (self._delivers or owner is not None):
                data = memory(sources[position], nbytes, owner)
                sources[position] = slot
            result = None
            if self._delivers and step.targets and step.targets[k]:
                result = memory(step.targets[k], nbytes, None)
                self._delivered.add(k)
            self._segments.append(Segment(offset, data, (), result))
        self._table.pointers[:] = sources
        self._table.pack()
        self._tail[:] = flags

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy the tensors to these addresses, indexed by tensor; 0: not that one.

        Those that the backend has delivered are there already.
        """
        self._table.pointers[:] = [
            0 if k in self._delivered else addresses[k] for k in self._members
        ]
        self._table.unpack()

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it; called once after each :meth:`pack`."""
        segments, self._segments = self._segments, []
        return backend.all_reduce(self.buffer, self.dtype, self._op, segments)

    def arrived(self, step: int) -> Arrival:
        """Read the flags of the reduced message.

        Args:
            step: this rank's step number.
        """
        return self._flags.read(self._tail, step)


def aligned_bytes(size: int, carrier: Backend | None = None) -> Buffer:
    """Zeroed bytes that start at a cache line, where the carrier wants them."""
    size_of_all = size + _LINE_BYTES
    raw = zeroed(size_of_all) if carrier is None else carrier.zeros(size_of_all)
    start = -raw.__array_interface__["data"][0] % _LINE_BYTES
    return raw[start : start + size]


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds elements of ``dtype`` (uint16 for bfloat16)."""
    return _STORAGE.get(dtype) or np.dtype(dtype)

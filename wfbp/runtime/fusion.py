"""Fusion buffers: where the tensors of each group lie while they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wfbp import native
from wfbp.comm.backend import Backend, Buffer, Work
from wfbp.core.plan import ALIGNMENT_BYTES, Plan
from wfbp.core.types import Op, item_bytes
from wfbp.runtime.flags import Arrival, Flags

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
    """

    def __init__(self, plan: Plan, group: int, op: Op, size: int) -> None:
        self.dtype = plan.dtype(group)
        self._op = op
        self._flags = Flags(plan, group)
        self._offsets = plan.offsets(group)
        self._members = plan.groups[group].tensors
        self._nbytes = [plan.tensors[k].nbytes for k in self._members]
        width = item_bytes(self.dtype)
        data = -(-plan.nbytes(group) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._bytes = aligned_bytes(data + self._flags.count * width)
        self.buffer: Buffer = self._bytes.view(storage_dtype(self.dtype))
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

    def pack(
        self, addresses: Sequence[int], requested: bool, step: int, discards: bool = False
    ) -> None:
        """Copy what lies at the addresses (indexed by tensor; 0: absent, zeros)."""
        sources = [addresses[k] for k in self._members]
        self._table.pointers[:] = sources
        self._table.pack()
        self._tail[:] = self._flags.values(sources, requested, step, discards)

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy the tensors to these addresses, indexed by tensor; 0: not that one."""
        self._table.pointers[:] = [addresses[k] for k in self._members]
        self._table.unpack()

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it."""
        return backend.all_reduce(self.buffer, self.dtype, self._op)

    def arrived(self, step: int) -> Arrival:
        """Read the flags of the reduced message.

        Args:
            step: this rank's step number.
        """
        return self._flags.read(self._tail, step)


def aligned_bytes(size: int) -> Buffer:
    """Zeroed bytes that start at a cache line."""
    raw = np.zeros(size + _LINE_BYTES, dtype=np.uint8)
    start = -raw.__array_interface__["data"][0] % _LINE_BYTES
    return raw[start : start + size]


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds elements of ``dtype`` (uint16 for bfloat16)."""
    return _STORAGE.get(dtype) or np.dtype(dtype)

"""Fusion buffers: where the tensors of each group lie while they travel.

Behind its tensors every message carries one element per tensor that says whether this rank had a
gradient for it (a *presence flag*), and the last message of a step also the *border*: whether the
rank asks for a round of talk at the step border, whether it discards the step, and the step's
number. They cost a few bytes and no message of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wfbp import native
from wfbp.comm.backend import Buffer
from wfbp.core.plan import ALIGNMENT_BYTES, Plan
from wfbp.core.types import Op, item_bytes

NUM_BORDER = 3
STEP_CYCLE = 64
"""Step numbers travel modulo this: exact in every floating type."""

_STORAGE = {"bfloat16": np.dtype(np.uint16)}
_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a completed group's flags say.

    Args:
        present: per tensor of the group, whether any rank had a gradient for it.
        requested: whether any rank asks for talk at the step border (last group only).
        discarded: whether any rank discards the step (last group only).
        steps_agree: whether all ranks are at the same step (last group only).
    """

    present: list[bool]
    requested: bool = False
    discarded: bool = False
    steps_agree: bool = True


class FusionBuffer:
    """Storage of one group, and the packing into it.

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
        self.offsets = plan.offsets(group)
        self._flag_total = 1 if op is Op.AVERAGE else size
        self._members = plan.groups[group].tensors
        self._nbytes = [plan.tensors[k].nbytes for k in self._members]
        self._is_last = group == len(plan.groups) - 1
        width = item_bytes(self.dtype)
        data = -(-plan.nbytes(group) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        num_tail = len(self._members) + (NUM_BORDER if self._is_last else 0)
        self._bytes = aligned_bytes(data + num_tail * width)
        self.buffer: Buffer = self._bytes.view(_STORAGE.get(self.dtype, self.dtype))
        self._tail = self.buffer[data // width :]
        self._table = native.PackTable(
            self._bytes,
            np.asarray(self.offsets, dtype=np.int64),
            np.asarray(self._nbytes, dtype=np.int64),
            self.dtype,
        )

    def slot(self, position: int) -> Buffer:
        """The bytes of the group's tensor at ``position``, as uint8."""
        start = self.offsets[position]
        return self._bytes[start : start + self._nbytes[position]]

    def pack(
        self, addresses: Sequence[int], requested: bool, step: int, discards: bool = False
    ) -> None:
        """Copy what lies at the addresses (indexed by tensor; 0: absent, zeros)."""
        sources = [addresses[k] for k in self._members]
        self._table.pointers[:] = sources
        self._table.pack()
        tail = [1.0 if address else 0.0 for address in sources]
        if self._is_last:
            tail += [float(requested), float(discards), float(1 + step % STEP_CYCLE)]
        self._tail[:] = _encode(tail, self.dtype)

    def arrived(self, step: int) -> Arrival:
        """Read the flags of the reduced message.

        Args:
            step: this rank's step number.
        """
        tail = _decode(self._tail, self.dtype)
        present = [value > 0 for value in tail[: len(self._members)]]
        if not self._is_last:
            return Arrival(present)
        requested, discarded, steps = tail[-NUM_BORDER:]
        expected = (1 + step % STEP_CYCLE) * self._flag_total
        slack = expected * (1e-5 if item_bytes(self.dtype) >= 4 else 1 / 128)
        agree = abs(steps - expected) <= slack
        return Arrival(present, requested > 0, discarded > 0, agree)


def aligned_bytes(size: int) -> Buffer:
    """Zeroed bytes that start at a cache line."""
    raw = np.zeros(size + _LINE_BYTES, dtype=np.uint8)
    start = -raw.__array_interface__["data"][0] % _LINE_BYTES
    return raw[start : start + size]


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds elements of ``dtype`` (uint16 for bfloat16)."""
    return _STORAGE.get(dtype) or np.dtype(dtype)


def _encode(values: list[float], dtype: str) -> Buffer:
    if dtype == "bfloat16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(values, dtype)


def _decode(values: Buffer, dtype: str) -> list[float]:
    if dtype == "bfloat16":
        wide = (values.astype(np.uint32) << 16).view(np.float32)
        return [float(v) for v in wide]
    return [float(v) for v in values]

"""What every message says beside its tensors.

Behind its tensors every message carries one element per tensor that says whether this rank had a
gradient for it (a *presence flag*), and the last message of backward also the *border*: whether the
rank asks for a round of talk at the step border, whether it discards the step, and the step's
number. They cost a few bytes and no message of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.core.plan import Plan
from wfbp.core.types import Op, item_bytes

NUM_BORDER = 3
STEP_CYCLE = 64
"""Step numbers travel modulo this: exact in every floating type."""


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


class Flags:
    """Writes and reads the flags of one group.

    Args:
        plan: what is sent.
        group: index of the group.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        size: number of ranks.
    """

    def __init__(self, plan: Plan, group: int, op: Op, size: int) -> None:
        self._dtype = plan.dtype(group)
        self._num_tensors = len(plan.groups[group].tensors)
        self._is_last = group == plan.num_backward - 1
        self._total = 1 if op is Op.AVERAGE else size
        self.count = self._num_tensors + (NUM_BORDER if self._is_last else 0)
        """Elements of the group's type that the flags take."""

    def values(
        self, addresses: Sequence[int], requested: bool, step: int, discards: bool
    ) -> Buffer:
        """The flags of this rank.

        Args:
            addresses: of the group's gradients; 0 where there is none.
            requested: whether the rank asks for talk at the step border.
            step: its number.
            discards: whether the rank discards the step.
        """
        flags = [1.0 if address else 0.0 for address in addresses]
        if self._is_last:
            flags += [float(requested), float(discards), float(1 + step % STEP_CYCLE)]
        return _encode(flags, self._dtype)

    def read(self, reduced: Buffer, step: int) -> Arrival:
        """What the reduced flags say to a rank that is at this step."""
        flags = _decode(reduced, self._dtype)
        present = [value > 0 for value in flags[: self._num_tensors]]
        if not self._is_last:
            return Arrival(present)
        requested, discarded, steps = flags[-NUM_BORDER:]
        expected = (1 + step % STEP_CYCLE) * self._total
        slack = expected * (1e-5 if item_bytes(self._dtype) >= 4 else 1 / 128)
        agree = abs(steps - expected) <= slack
        return Arrival(present, requested > 0, discarded > 0, agree)


def _encode(values: list[float], dtype: str) -> Buffer:
    if dtype == "bfloat16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(values, dtype)


def _decode(values: Buffer, dtype: str) -> list[float]:
    if dtype == "bfloat16":
        wide = (values.astype(np.uint32) << 16).view(np.float32)
        return [float(v) for v in wide]
    return [float(v) for v in values]

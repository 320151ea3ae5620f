"""What ranks tell each other of a step beside its gradients: presence, requests, the step's number.

In the host's memory the flags travel behind the tensors of each message. On a device reading them
would make the host wait in every step; so they travel on their own, through the host, in one small
all-reduce that is started when the step's last group leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Work
from wfbp.core.plan import Plan
from wfbp.core.types import Op
from wfbp.runtime.step import Step

_STEP_BITS = 6
STEP_CYCLE = 1 << _STEP_BITS
"""Step numbers travel modulo this."""

NUM_STEP_FLAGS = 2 + 2 * _STEP_BITS


@dataclass(frozen=True, slots=True)
class GroupFlags:
    """The reduced flags of a group.

    Args:
        present: per tensor of the group, whether any rank had a gradient for it.
        requested: whether any rank asks to synchronize at the end of the step (last group only).
        discarded: whether any rank discards the step (last group only).
        steps_agree: whether all ranks are at the same step (last group only).
        tensors: the tensors of the plan to which ``present`` belongs.
    """

    present: list[bool]
    requested: bool = False
    discarded: bool = False
    steps_agree: bool = True
    tensors: Sequence[int] = ()


class FlagCodec:
    """Writes and reads the flags of one group, of ``dtype``, by default the group's."""

    def __init__(self, plan: Plan, group: int, dtype: str = "") -> None:
        self._dtype = dtype or plan.dtype(group)
        self._tensors = plan.groups[group].tensors
        self._num_tensors = len(self._tensors)
        self._is_last = group == plan.num_backward - 1
        self.count = self._num_tensors + (NUM_STEP_FLAGS if self._is_last else 0)
        """Elements of the message's type that the flags take."""

    def values(
        self, addresses: Sequence[int], requested: bool, step: int, discards: bool
    ) -> Buffer:
        """The flags of this rank; ``addresses`` are of the group's gradients, 0 where there is
        none."""
        flags = [1.0 if address else 0.0 for address in addresses]
        if self._is_last:
            flags += [float(requested), float(discards), *step_flags(step)]
        return _encode(flags, self._dtype)

    def read(self, reduced: Buffer, step: int) -> GroupFlags:
        """What the reduced flags say to a rank that is at this step."""
        flags = _decode(reduced, self._dtype)
        present = [value > 0 for value in flags[: self._num_tensors]]
        if not self._is_last:
            return GroupFlags(present, tensors=self._tensors)
        requested, discarded, *steps = flags[-NUM_STEP_FLAGS:]
        agree = all((s > 0) == (own > 0) for s, own in zip(steps, step_flags(step), strict=True))
        return GroupFlags(present, requested > 0, discarded > 0, agree, self._tensors)


def step_flags(step: int) -> list[float]:
    """Per bit of the step's number, whether it is set, and whether it is not."""
    bits = [step >> k & 1 for k in range(_STEP_BITS)]
    return [float(flag) for bit in bits for flag in (bit, 1 - bit)]


def _encode(values: list[float], dtype: str) -> Buffer:
    if dtype == "bfloat16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(values, dtype)


def _decode(values: Buffer, dtype: str) -> list[float]:
    if dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    decoded: list[float] = values.tolist()
    return decoded


class HostFlags:
    """The flags of all tensors of a plan, sent through the host. Used under the progress lock."""

    def __init__(self, plan: Plan, host: Backend) -> None:
        self._host = host
        self._tensors = range(len(plan.tensors))
        self._message = np.zeros(len(plan.tensors) + NUM_STEP_FLAGS, np.uint8)

    def send(self, step: Step) -> Work[None]:
        """Tell the other ranks of a step that is closed."""
        step_values = [step.requested, step.discards, *step_flags(step.number)]
        self._message[:] = [bool(address) for address in step.addresses] + step_values
        return self._host.all_reduce(self._message, "uint8", Op.MAX)

    def read(self, number: int) -> GroupFlags:
        """What any rank has said."""
        flags = self._message > 0
        requested, discarded, *steps = flags[len(self._tensors) :].tolist()
        agree = steps == [flag > 0 for flag in step_flags(number)]
        present = flags[: len(self._tensors)].tolist()
        return GroupFlags(present, requested, discarded, agree, self._tensors)

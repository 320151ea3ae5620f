"""Gradients that are reduced where they lie: a message of one tensor needs no packing.

Only where all groups leave behind backward, because from then on nobody writes gradients; and not
the last group, whose message carries what every rank has to be told of all (``runtime.flags``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from wfbp.comm.backend import Backend, Buffer, Work
from wfbp.core.plan import Plan
from wfbp.core.types import Op
from wfbp.runtime.flags import Arrival
from wfbp.runtime.fusion import aligned_bytes, storage_dtype
from wfbp.runtime.slot import Slot
from wfbp.runtime.steps import Step


class InPlaceBuffer:
    """A group of one tensor in its own memory; stands in for a ``FusionBuffer``.

    Args:
        plan: what to send.
        group: index of a group of which ``plan.in_place`` holds.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
    """

    flagged: Sequence[int] = ()

    def __init__(self, plan: Plan, group: int, op: Op) -> None:
        (self._tensor,) = plan.groups[group].tensors
        self.nbytes = plan.tensors[self._tensor].nbytes
        self._dtype = plan.dtype(group)
        self._op = op
        self._address = 0
        self._bytes: Buffer = np.empty(0, np.uint8)
        self._zeros: Buffer | None = None

    def pack(
        self, addresses: Sequence[int], requested: bool, step: int, discards: bool = False
    ) -> None:
        """Point at the gradient (addresses are indexed by tensor), or at zeros where it is 0."""
        address = addresses[self._tensor]
        if not address:
            self._bytes = self.absent()
            self._bytes.fill(0)
        elif address != self._address:
            self._bytes = bytes_at(address, self.nbytes)
        self._address = address

    def absent(self) -> Buffer:
        """What is sent where this rank has no gradient."""
        if self._zeros is None:
            self._zeros = aligned_bytes(self.nbytes)
        return self._zeros

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it."""
        return backend.all_reduce(
            self._bytes.view(storage_dtype(self._dtype)), self._dtype, self._op
        )

    def arrived(self, step: int) -> Arrival:
        """Nothing travels with it."""
        return Arrival([])

    def unpack(self, addresses: Sequence[int]) -> None:
        """It is there already: see :meth:`InPlace.settle`."""


class InPlace:
    """The tensors of a plan that are reduced where they lie, as the training thread has them.

    Tensors are known by their place in the plan.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, InPlaceBuffer] = {}

    def __contains__(self, place: int) -> bool:
        return place in self._buffers

    def add(self, place: int, buffer: InPlaceBuffer) -> None:
        """Know a tensor, and what carries it."""
        self._buffers[place] = buffer

    def settle(self, step: Step) -> None:
        """Before the step closes: gradients lie where they are wanted, and no two in one place."""
        taken = set()
        for place, buffer in self._buffers.items():
            address = step.addresses[place]
            if not address:
                continue
            target = step.targets[place] if step.targets else address
            if target != address or address in taken:
                found = bytes_at(address, buffer.nbytes)
                held = bytes_at(target, buffer.nbytes) if target != address else found.copy()
                np.copyto(held, found)
                step.addresses[place] = held.__array_interface__["data"][0]
                step.owners[place] = held
            taken.add(address)

    def slot(self, place: int, step: Step) -> Slot | None:
        """Where a reduced gradient lies; None for tensors that are not of these."""
        buffer = self._buffers.get(place)
        if buffer is None:
            return None
        address = step.addresses[place]
        if not address:
            return Slot.of(buffer.absent())
        return Slot(bytes_at(address, buffer.nbytes, step.owners[place]), address)


def bytes_at(address: int, nbytes: int, owner: object = None) -> Buffer:
    """The bytes at an address, at least one, as an array.

    Args:
        address: where.
        nbytes: how many.
        owner: kept alive as long as the array.
    """
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8)

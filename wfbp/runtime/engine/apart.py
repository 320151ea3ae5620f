"""Gradients that lie where another tensor's is averaged, which nobody could keep apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wfbp.core.types import TensorSpec
from wfbp.runtime.slot import BufferView, GradientRef


class AliasCheck:
    """The slots of a plan, each for one tensor's gradients alone.

    A program that lets two tensors share one gradient may put one into the other's slot. By the
    time that it is packed, the average may have come there, or a part of it.

    Args:
        specs: all tensors of the engine.
        members: per tensor of the plan, its index into the specs.
        slots: per tensor of the plan, where its gradient is averaged.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], members: Sequence[int], slots: Sequence[BufferView]
    ) -> None:
        self._specs = specs
        self._members = members
        # (Of a tensor without elements the address may be another one's.)
        self._owners = {
            slot.address: index
            for index, slot in zip(members, slots, strict=True)
            if slot.whole and specs[index].numel
        }

    def add(self, index: int, slot: BufferView) -> None:
        """A tensor's gradient is averaged here, too."""
        if slot.whole and self._specs[index].numel:
            self._owners[slot.address] = index

    def check(self, who: str, addresses: Sequence[int], extra: Mapping[int, GradientRef]) -> None:
        """Raise where a gradient lies in another tensor's slot.

        Args:
            who: rank and optimizer, for messages.
            addresses: of gradients, per tensor of the plan.
            extra: those that the plan does not carry as they are, by index.

        Raises:
            RuntimeError: which one, and where.
        """
        if not self._owners.keys().isdisjoint(addresses):
            for index, address in zip(self._members, addresses, strict=True):
                self._check(who, index, address)
        for index, (address, _) in extra.items():
            self._check(who, index, address)

    def _check(self, who: str, index: int, address: int) -> None:
        owner = self._owners.get(address, index)
        if owner != index and self._specs[index].numel:
            raise RuntimeError(
                f"{who}: the gradient of {self._specs[index].name} lies in memory in which that of "
                f"{self._specs[owner].name} is averaged; give each tensor a gradient of its own, "
                "for example by clone()"
            )

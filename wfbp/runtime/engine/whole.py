"""Whole gradients out of shards, where an optimizer cannot do with its shard."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wfbp.comm.backend import Buffer
from wfbp.core.types import TensorSpec
from wfbp.runtime.engine.gathers import AllGatherState
from wfbp.runtime.slot import BufferView
from wfbp.runtime.transport.shards import shard_range
from wfbp.runtime.transport.transport import Transport


class GradientAssembler:
    """Storage of gathered gradients, one buffer per tensor, made when it is first needed.

    Args:
        specs: all tensors of the engine.
        allgather: brings the other ranks' shards.
        transport: where gradients lie.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        allgather: AllGatherState,
        transport: Transport,
        rank: int,
        size: int,
    ) -> None:
        self._transport = transport
        self._specs = specs
        self._allgather = allgather
        self._ranges = [shard_range(spec, rank, size) for spec in specs]
        self._storage: list[Buffer | None] = [None] * len(specs)

    def forget(self) -> None:
        """Keep no storage but what is in use, until it is needed again."""
        self._storage = [None] * len(self._specs)

    def begin(
        self, reduced: Sequence[BufferView | None], kept: Collection[int] = ()
    ) -> list[BufferView | None]:
        """Gather what was scattered; the slots hold whole gradients once that has arrived.

        Args:
            reduced: per tensor its whole gradient or this rank's shard; None where no rank had a
                gradient.
            kept: addresses of what the program holds as its gradients: where storage was handed
                out that lies there, it is left to the program.

        Returns:
            The same with whole gradients in place of shards.
        """
        whole = list(reduced)
        addresses = [0] * len(whole)
        for index, slot in enumerate(reduced):
            if not self._allgather.gathered(index):
                continue
            storage = self._storage[index]
            if storage is None or self._transport.view(storage).address in kept:
                storage = self._storage[index] = self._transport.empty(self._specs[index].nbytes)
            taken = self._transport.view(storage)
            addresses[index] = taken.address
            if slot is not None:
                start, stop = self._ranges[index]
                data = slot.data[start:stop] if slot.whole else slot.data
                self._transport.copy(storage[start:stop], data)
                whole[index] = taken
        self._allgather.begin(addresses, self._storage)
        return whole

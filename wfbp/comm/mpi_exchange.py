"""All-reduce by direct exchange: a reduce-scatter and an all-gather from sends and receives.

The chunk is cut into one shard per rank. Each rank sends every other rank that rank's shard,
combines the contributions to its own shard in rank order, and sends the result to all. Every
byte crosses the link once per phase, 2(n-1)/n of the chunk in all per rank, the least possible.
A reduce-scatter ends after the first phase, and its shards need not be equal.

Why not the library's own: it has no bfloat16, it need not let NaN through a maximum, it rounds
half precision at every step, it averages in a second pass over all bytes instead of over one
shard in cache, and it is slower for large messages (docs/benchmarks/communication.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.arithmetic import combine
from wfbp.comm.backend import Buffer
from wfbp.comm.mpi_channel import NUM_TAGS, Family, Job
from wfbp.core.types import Op

if TYPE_CHECKING:
    from mpi4py import MPI


class Scratch:
    """Memory for the shards that arrive, kept from one exchange to the next."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []

    def take(self, nbytes: int) -> Buffer:
        """At least ``nbytes`` bytes."""
        for index, block in enumerate(self._free):
            if block.nbytes >= nbytes:
                return self._free.pop(index)
        # A block that proved too small is not kept: chunks soon all have the same size.
        self._free = self._free[1:]
        return np.empty(nbytes, np.uint8)

    def give(self, block: Buffer) -> None:
        """Take a block back."""
        self._free.append(block)


class Exchange(Job):
    """All-reduce or reduce-scatter of one chunk, in place.

    Args:
        comm: the communicator.
        family: told when a phase ends.
        scratch: where arriving shards are kept.
        sequence: number of the job on its channel, the same on every rank.
        shards: the chunk as one shard per rank, as ``buffers.typed`` gives them.
        dtype: their element type.
        op: how contributions combine.
        gather: whether every rank gets every shard's result, or only its own.
    """

    __slots__ = (
        "_block", "_comm", "_dtype", "_family", "_gathers", "_op", "_own", "_parts", "_pending",
        "_rank", "_reduced", "_scratch", "_shards", "_size", "_tag",
    )  # fmt: skip

    def __init__(
        self,
        comm: MPI.Comm,
        family: Family,
        scratch: Scratch,
        sequence: int,
        shards: Sequence[Buffer],
        dtype: str,
        op: Op,
        gather: bool,
    ) -> None:
        self._own = shards[comm.rank]
        self._parts = [shard.view(np.uint8) for shard in shards]
        self.nbytes = sum(part.size for part in self._parts)
        self._comm = comm
        self._family = family
        self._rank = comm.rank
        self._size = comm.size
        self._scratch = scratch
        self._tag = 2 * (sequence % NUM_TAGS)
        self._dtype = dtype
        self._op = op
        self._reduced = False
        self._gathers = gather

    def start(self) -> None:
        comm, size, tag, own, parts = self._comm, self._size, self._tag, self._own, self._parts
        length = own.nbytes
        self._block = block = self._scratch.take(length * (size - 1))
        shards = [own] * size
        pending = []
        end = 0
        for peer in self._peers():
            start, end = end, end + length
            arriving = block[start:end]
            shards[peer] = arriving.view(own.dtype)
            if length:
                pending.append(comm.Irecv(arriving, peer, tag))
            if parts[peer].size:
                pending.append(comm.Isend(parts[peer], peer, tag))
        self._shards, self._pending = shards, pending

    def step(self) -> bool:
        pending = self._pending
        while pending:
            if not pending[-1].Test():
                return False
            pending.pop()
        if self._reduced:
            return True
        self._reduced = True
        self._family.moves += 1
        combine(self._shards, self._own, self._dtype, self._op)
        self._shards = []
        self._scratch.give(self._block)
        if self._gathers:
            self._gather()
        return not pending

    def _gather(self) -> None:
        comm, tag, pending, parts = self._comm, self._tag + 1, self._pending, self._parts
        mine = parts[self._rank]
        for peer in self._peers():
            if parts[peer].size:
                pending.append(comm.Irecv(parts[peer], peer, tag))
            if mine.size:
                pending.append(comm.Isend(mine, peer, tag))

    def _peers(self) -> list[int]:
        """The other ranks, the next one first: ranks start with different peers."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

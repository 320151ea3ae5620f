"""All-reduce by direct exchange: a reduce-scatter and an all-gather from sends and receives.

The chunk is cut into one shard per rank. Each rank sends every other rank that rank's shard,
combines the contributions to its own shard in rank order, and sends the result to all. Every
byte crosses the link once per phase, 2(n-1)/n of the chunk in all per rank, the least possible.

Why not the library's own: it has no bfloat16, it need not let NaN through a maximum, it rounds
half precision at every step, it averages in a second pass over all bytes instead of over one
shard in cache, and it is slower for large messages (docs/benchmarks/communication.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.arithmetic import combine
from wfbp.comm.backend import Buffer
from wfbp.comm.chunking import split
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
    """All-reduce of one chunk, in place.

    Args:
        comm: the communicator.
        family: told when a phase ends.
        scratch: where arriving shards are kept.
        sequence: number of the job on its channel, the same on every rank.
        buffer: the chunk, as ``buffers.typed`` gives it.
        dtype: its element type.
        op: how contributions combine.
    """

    __slots__ = (
        "_block", "_buffer", "_comm", "_dtype", "_family", "_op", "_pending", "_rank", "_reduced",
        "_scratch", "_shards", "_size", "_tag",
    )  # fmt: skip

    def __init__(
        self,
        comm: MPI.Comm,
        family: Family,
        scratch: Scratch,
        sequence: int,
        buffer: Buffer,
        dtype: str,
        op: Op,
    ) -> None:
        self.nbytes = buffer.nbytes
        self._comm = comm
        self._family = family
        self._rank = comm.rank
        self._size = comm.size
        self._scratch = scratch
        self._tag = 2 * (sequence % NUM_TAGS)
        self._buffer = buffer
        self._dtype = dtype
        self._op = op
        self._shards: list[Buffer] = []
        self._pending: list[MPI.Request] = []
        self._reduced = False

    def start(self) -> None:
        comm, rank, tag, buffer = self._comm, self._rank, self._tag, self._buffer
        mine, *others = self._rotated([buffer[a:b] for a, b in split(buffer.size, self._size)])
        num_bytes = mine.nbytes
        self._block = self._scratch.take(num_bytes * (self._size - 1))
        shards = [mine]
        for step in range(1, self._size):
            peer = (rank + step) % self._size
            theirs = self._block[(step - 1) * num_bytes : step * num_bytes].view(buffer.dtype)
            shards.append(theirs)
            if num_bytes:
                self._pending.append(comm.Irecv(_bytes(theirs), peer, tag))
            if others[step - 1].size:
                self._pending.append(comm.Isend(_bytes(others[step - 1]), peer, tag))
        # In rank order again: shards[step] came from rank + step.
        self._shards = [shards[(source - rank) % self._size] for source in range(self._size)]

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
        combine(self._shards, self._shards[self._rank], self._dtype, self._op)
        self._shards = []
        self._scratch.give(self._block)
        self._gather()
        return not pending

    def _gather(self) -> None:
        comm, rank, tag, buffer = self._comm, self._rank, self._tag + 1, self._buffer
        mine, *others = self._rotated([buffer[a:b] for a, b in split(buffer.size, self._size)])
        for step, theirs in enumerate(others, start=1):
            peer = (rank + step) % self._size
            if theirs.size:
                self._pending.append(comm.Irecv(_bytes(theirs), peer, tag))
            if mine.size:
                self._pending.append(comm.Isend(_bytes(mine), peer, tag))

    def _rotated(self, shards: list[Buffer]) -> list[Buffer]:
        """This rank's first: ranks start with different peers, so that none is swamped."""
        return shards[self._rank :] + shards[: self._rank]


def _bytes(shard: Buffer) -> Buffer:
    return shard.view(np.uint8)

"""Collectives by direct exchange: reduce-scatter, all-gather and both, from sends and receives.

The chunk is cut into one shard per rank. Each rank sends every other rank that rank's shard,
combines the contributions to its own shard in rank order, and sends the result to all. Every
byte crosses the link once per phase, 2(n-1)/n of the chunk in all per rank, the least possible.
A reduce-scatter is the first phase alone, an all-gather the second, and shards need not be equal.

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
        "_reduced", "_scratch", "_shards", "_tag",
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
        self._scratch = scratch
        self._tag = 2 * (sequence % NUM_TAGS)
        self._dtype = dtype
        self._op = op
        self._reduced = False
        self._gathers = gather

    def start(self) -> None:
        comm, tag, own, parts = self._comm, self._tag, self._own, self._parts
        length = own.nbytes
        self._block = block = self._scratch.take(length * (comm.size - 1))
        shards = [own] * comm.size
        pending = []
        end = 0
        for peer in _peers(comm):
            start, end = end, end + length
            arriving = block[start:end]
            shards[peer] = arriving.view(own.dtype)
            if length:
                pending.append(comm.Irecv(arriving, peer, tag))
            if parts[peer].size:
                pending.append(comm.Isend(parts[peer], peer, tag))
        self._shards, self._pending = shards, pending

    def step(self) -> bool:
        if not _complete(self._pending):
            return False
        if self._reduced:
            return True
        self._reduced = True
        self._family.moves += 1
        combine(self._shards, self._own, self._dtype, self._op)
        self._shards = []
        self._scratch.give(self._block)
        if self._gathers:
            self._pending = _send_own(self._comm, self._tag + 1, self._parts)
        return not self._pending


class Gather(Job):
    """All-gather of one chunk, in place.

    Args:
        comm: the communicator.
        sequence: number of the job on its channel, the same on every rank.
        parts: the chunk as one uint8 part per rank; this rank's is sent, the others arrive.
    """

    __slots__ = ("_comm", "_parts", "_pending", "_tag")

    def __init__(self, comm: MPI.Comm, sequence: int, parts: Sequence[Buffer]) -> None:
        self.nbytes = sum(part.size for part in parts)
        self._comm = comm
        self._parts = parts
        self._tag = 2 * (sequence % NUM_TAGS)

    def start(self) -> None:
        self._pending = _send_own(self._comm, self._tag, self._parts)

    def step(self) -> bool:
        return _complete(self._pending)


def _send_own(comm: MPI.Comm, tag: int, parts: Sequence[Buffer]) -> list[MPI.Request]:
    """Begin to send this rank's part to all, and to receive each other rank's."""
    mine = parts[comm.rank]
    pending = []
    for peer in _peers(comm):
        if parts[peer].size:
            pending.append(comm.Irecv(parts[peer], peer, tag))
        if mine.size:
            pending.append(comm.Isend(mine, peer, tag))
    return pending


def _complete(pending: list[MPI.Request]) -> bool:
    """Whether all requests are complete; those that are found to be are taken from the list."""
    while pending:
        if not pending[-1].Test():
            return False
        pending.pop()
    return True


def _peers(comm: MPI.Comm) -> list[int]:
    """The other ranks, the next one first: ranks start with different peers."""
    rank, size = comm.rank, comm.size
    return [(rank + step) % size for step in range(1, size)]

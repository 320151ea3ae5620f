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


class Sending(Job):
    """A job that waits for requests, the last of the list first."""

    __slots__ = ("_pending",)
    _pending: list[MPI.Request]

    def stirs(self) -> bool:
        return not self._pending or self._pending[-1].Get_status()


class Exchange(Sending):
    """All-reduce or reduce-scatter of one chunk.

    Args:
        comm: the communicator.
        family: told when a piece has arrived and when a phase ends.
        scratch: where arriving shards are kept.
        sequence: number of the job on its channel, the same on every rank.
        shards: what this rank contributes to each rank's shard, in pieces as ``buffers.typed``
            gives them; cut in the same places on every rank.
        results: where the combined shards go, one per rank; may be what this rank contributes.
            Without ``gather`` only its own is used.
        dtype: their element type.
        op: how contributions combine.
        gather: whether every rank gets every shard's result, or only its own.
    """

    __slots__ = (
        "_arrived", "_block", "_comm", "_dtype", "_family", "_gathers", "_op", "_reduced",
        "_results", "_scratch", "_shards", "_tag",
    )  # fmt: skip

    def __init__(
        self,
        comm: MPI.Comm,
        family: Family,
        scratch: Scratch,
        sequence: int,
        shards: Sequence[Sequence[Buffer]],
        results: Sequence[Buffer],
        dtype: str,
        op: Op,
        gather: bool,
    ) -> None:
        self._shards = shards
        self._results = results
        self.nbytes = sum(piece.nbytes for shard in shards for piece in shard)
        self._comm = comm
        self._family = family
        self._scratch = scratch
        self._tag = 2 * (sequence % NUM_TAGS)
        self._dtype = dtype
        self._op = op
        self._reduced = False
        self._gathers = gather

    def start(self) -> None:
        comm, tag = self._comm, self._tag
        own = self._shards[comm.rank]
        self._block = block = self._scratch.take(
            sum(piece.nbytes for piece in own) * (comm.size - 1)
        )
        # Per piece of this rank's shard, what each rank contributes.
        self._arrived = [[piece] * comm.size for piece in own]
        pending: list[MPI.Request] = []
        end = 0
        for peer in _peers(comm):
            for piece, contributions in zip(own, self._arrived, strict=True):
                start, end = end, end + piece.nbytes
                arriving = block[start:end]
                contributions[peer] = arriving.view(piece.dtype)
                pending.append(comm.Irecv(arriving, peer, tag))
            for piece in self._shards[peer]:
                pending.append(comm.Isend(piece.view(np.uint8), peer, tag))
        pending.reverse()  # looked at from the end
        self._pending = pending

    def step(self) -> bool:
        if not _complete(self._pending, self._family):
            return False
        if self._reduced:
            return True
        self._reduced = True
        self._family.moves += 1
        result = self._results[self._comm.rank]
        end = 0
        for contributions in self._arrived:
            start, end = end, end + contributions[0].size
            combine(contributions, result[start:end], self._dtype, self._op)
        self._shards = self._arrived = []
        self._scratch.give(self._block)
        if self._gathers:
            parts = [[result.view(np.uint8)] for result in self._results]
            self._pending = _send_own(self._comm, self._tag + 1, parts)
        return not self._pending


class Gather(Sending):
    """All-gather of one chunk, in place.

    Args:
        comm: the communicator.
        family: told when a piece has arrived.
        sequence: number of the job on its channel, the same on every rank.
        parts: the chunk as one part per rank, in pieces of uint8 that are cut in the same places
            on every rank; this rank's is sent, the others arrive.
    """

    __slots__ = ("_comm", "_family", "_parts", "_tag")

    def __init__(
        self, comm: MPI.Comm, family: Family, sequence: int, parts: Sequence[Sequence[Buffer]]
    ) -> None:
        self.nbytes = sum(piece.size for part in parts for piece in part)
        self._comm = comm
        self._family = family
        self._parts = parts
        self._tag = 2 * (sequence % NUM_TAGS)

    def start(self) -> None:
        self._pending = _send_own(self._comm, self._tag, self._parts)

    def step(self) -> bool:
        return _complete(self._pending, self._family)


def _send_own(comm: MPI.Comm, tag: int, parts: Sequence[Sequence[Buffer]]) -> list[MPI.Request]:
    """Begin to send this rank's part to all, and to receive each other rank's."""
    mine = parts[comm.rank]
    pending = []
    for peer in _peers(comm):
        pending += [comm.Irecv(piece, peer, tag) for piece in parts[peer] if piece.size]
        pending += [comm.Isend(piece, peer, tag) for piece in mine if piece.size]
    pending.reverse()  # looked at from the end
    return pending


def _complete(pending: list[MPI.Request], family: Family) -> bool:
    """Whether all requests are complete; those that are found to be are taken from the list."""
    while pending:
        if not pending[-1].Test():
            return False
        pending.pop()
        family.moves += 1
    return True


def _peers(comm: MPI.Comm) -> list[int]:
    """The other ranks, the next one first: ranks start with different peers."""
    rank, size = comm.rank, comm.size
    return [(rank + step) % size for step in range(1, size)]

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

from wfbp.comm.backend import Buffer
from wfbp.comm.mpi.mpi_channel import NUM_TAGS, Job, ProgressGroup
from wfbp.comm.mpi.transfers import Message, Reduction, Transfer
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


class TransferJob(Job):
    """A job that is one transfer."""

    __slots__ = ("_transfer",)
    is_transfer = True
    _transfer: Transfer

    def step(self) -> bool:
        return self._transfer.done

    def may_progress(self) -> bool:
        return self._transfer.done


class DirectReduce(TransferJob):
    """All-reduce or reduce-scatter of one chunk.

    Args:
        comm: the communicator.
        family: whose transfers carry it.
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
        "_block", "_comm", "_dtype", "_family", "_gathers", "_op", "_results", "_scratch",
        "_shards", "_tag",
    )  # fmt: skip

    def __init__(
        self,
        comm: MPI.Comm,
        family: ProgressGroup,
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
        self._gathers = gather

    def start(self) -> None:
        comm, result = self._comm, self._results[self._comm.rank]
        own = self._shards[comm.rank]
        self._block = block = self._scratch.take(
            sum(piece.nbytes for piece in own) * (comm.size - 1)
        )
        # Per piece of this rank's shard, what each rank contributes, and where the result goes.
        pieces = []
        end = 0
        for piece in own:
            start, end = end, end + piece.size
            pieces.append(([piece] * comm.size, result[start:end]))
        messages: list[Message] = []
        end = 0
        for peer in _peers(comm):
            for piece, (contributions, _) in zip(own, pieces, strict=True):
                start, end = end, end + piece.nbytes
                contributions[peer] = arriving = block[start:end].view(piece.dtype)
                messages.append((arriving, peer, True))
            messages += [(piece, peer, False) for piece in self._shards[peer]]
        then = _own_part(comm, [[part] for part in self._results]) if self._gathers else ()
        reduced = Reduction(self._dtype, self._op, pieces)
        self._transfer = self._family.transfers.begin(comm, self._tag, messages, reduced, then)

    def step(self) -> bool:
        if not self._transfer.done:
            return False
        self._scratch.give(self._block)
        return True


class DirectGather(TransferJob):
    """All-gather of one chunk, in place.

    Args:
        comm: the communicator.
        family: whose transfers carry it.
        sequence: number of the job on its channel, the same on every rank.
        parts: the chunk as one part per rank, in pieces of uint8 that are cut in the same places
            on every rank; this rank's is sent, the others arrive.
    """

    __slots__ = ("_comm", "_family", "_parts", "_tag")

    def __init__(
        self,
        comm: MPI.Comm,
        family: ProgressGroup,
        sequence: int,
        parts: Sequence[Sequence[Buffer]],
    ) -> None:
        self.nbytes = sum(piece.size for part in parts for piece in part)
        self._comm = comm
        self._family = family
        self._parts = parts
        self._tag = 2 * (sequence % NUM_TAGS)

    def start(self) -> None:
        messages = _own_part(self._comm, self._parts)
        self._transfer = self._family.transfers.begin(self._comm, self._tag, messages)


def _own_part(comm: MPI.Comm, parts: Sequence[Sequence[Buffer]]) -> list[Message]:
    """This rank's part for all others, and each of theirs."""
    messages: list[Message] = []
    for peer in _peers(comm):
        messages += [(piece, peer, True) for piece in parts[peer] if piece.size]
        messages += [(piece, peer, False) for piece in parts[comm.rank] if piece.size]
    return messages


def _peers(comm: MPI.Comm) -> list[int]:
    """The other ranks, the next one first: ranks start with different peers."""
    rank, size = comm.rank, comm.size
    return [(rank + step) % size for step in range(1, size)]

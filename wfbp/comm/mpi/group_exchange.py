"""Collectives on ordinary memory among some of the ranks, for the backend of ``torch.distributed``.

On one host each rank copies its part of a chunk into a staging buffer, and takes what it needs from
its peers' (``two_level``). An all-reduce of more than :data:`SMALL_BYTES` combines one shard per
rank in between. Between hosts, ranks send messages directly. Either way the ranks that take part
make the communicator alone.

The staging buffers also carry a *fingerprint* of the operation, so that ranks in different
operations notice before they read each other's data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from wfbp.comm.arrays import Buffer, combine, typed
from wfbp.comm.backend import Work
from wfbp.comm.mpi.shm_memory import SharedMemory
from wfbp.comm.mpi.topology import Topology
from wfbp.comm.mpi.transfers import (
    NUM_TAGS,
    Blocks,
    Channel,
    Chunking,
    Task,
    TransferTask,
    begin_messages,
    chunks,
    split_message,
)
from wfbp.comm.mpi.two_level import SharedFlags, SharedTask, TwoLevel
from wfbp.core.encoding import decode, encode
from wfbp.core.types import Op

if TYPE_CHECKING:
    from mpi4py import MPI

    from wfbp.comm.mpi.mpi_backend import MpiBackend

STAGED = Chunking(chunk_bytes=2 << 20, window_bytes=8 << 20)
"""Chunks that stay in a core's cache; several, because a rank may wait for its core."""
SMALL_BYTES = 64 << 10
"""All-reduces of up to this size are combined by every rank as a whole."""

_ENTRY_BYTES = 16
_HEADER_TAG = 2 * NUM_TAGS
"""MPI's tag of the headers of messages. Their data have larger tags, collectives smaller ones."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """How contributions are combined: natively by ``op``, or by a function of the bytes.

    ``dtype`` is a key of ``ITEM_BYTES`` for a native reduction. A ``function`` gets each rank's
    bytes in rank order, and the place of the result, which may be one of them.
    """

    item_bytes: int
    dtype: str = ""
    op: Op = Op.SUM
    function: Callable[[Sequence[Buffer], Buffer], None] | None = None

    def __call__(self, shards: Sequence[Buffer], out: Buffer) -> None:
        if not out.size:
            return
        if self.function is not None:
            self.function(shards, out)
        else:
            dtype = self.dtype
            parts = [typed(shard, dtype, writeable=False) for shard in shards]
            combine(parts, typed(out, dtype), dtype, self.op)


class MoveTask(SharedTask):
    """Blocks from every rank to every rank. With a reduction, those for this rank are combined into
    its own incoming block, if it has one.

    A staging buffer starts with the offset and the size of the block for each rank. A block that
    goes to several ranks is copied once.
    """

    gathers = False

    def __init__(
        self,
        flags: SharedFlags,
        fingerprint: int,
        outgoing: Blocks,
        incoming: Blocks,
        reduction: Reduction | None,
    ) -> None:
        self._incoming, self._reduction = incoming, reduction
        self._own = outgoing[flags.rank]
        self._table = np.zeros((len(outgoing), 2), np.int64)
        self._parts: dict[int, tuple[int, Buffer]] = {}
        end = self._table.nbytes
        for rank, block in enumerate(outgoing):
            if block is None or rank == flags.rank:
                continue
            if id(block) not in self._parts:
                self._parts[id(block)] = end, block
                end += -(-block.nbytes // 8) * 8  # aligned for every element type
            self._table[rank] = self._parts[id(block)][0], block.nbytes
        super().__init__(flags, None, end, fingerprint)
        received = sum(block.nbytes for block in incoming if block is not None)
        self.nbytes = max(end, received if reduction is None else received * len(incoming))

    def fill(self) -> None:
        self._shared[: self._table.nbytes] = self._table.reshape(-1).view(np.uint8)
        for start, block in self._parts.values():
            self._shared[start : start + block.nbytes] = block

    def combine(self) -> bool:
        result, reduction = self._incoming[self._flags.rank], self._reduction
        wanted = self._incoming if reduction is None else [result] * len(self._incoming)
        pairs = [
            (place, self._block_of(peer)) for peer, place in enumerate(wanted) if place is not None
        ]
        if any(place.nbytes != block.nbytes for place, block in pairs):
            return False
        if reduction is None:
            for place, block in pairs:
                place[:] = block
        elif result is not None:
            reduction([block for _, block in pairs], result)
        return True

    def _block_of(self, peer: int) -> Buffer:
        """The block of a rank for this one, where it is."""
        if peer == self._flags.rank:
            assert self._own is not None
            return self._own
        entry = self._view(peer, _ENTRY_BYTES * self._flags.rank, _ENTRY_BYTES)
        start, nbytes = entry.view(np.int64).tolist()
        return self._view(peer, start, nbytes)


class GroupExchange:
    """Collectives among the ranks of one group; used under the progress lock.

    Every rank of the group starts the same collectives in the same order. A block's size is the
    same on its sender and on its receiver, and ``num_chunks`` is the same on every rank.
    """

    def __init__(
        self,
        backend: MpiBackend,
        channel: Channel,
        memory: SharedMemory | None,
        places: Sequence[int],
        topology: Topology,
        ranks: Sequence[int],
    ) -> None:
        self.backend, self.channel, self.ranks = backend, channel, tuple(ranks)
        self.rank, self.size = backend.rank, backend.size
        self.undelivered = 0
        """Messages sent less those received; 0 in sum over all ranks if none is under way."""
        self._status = channel.mpi.Status()
        self._chunk_bytes = topology.chunking.chunk_bytes
        self._levels: TwoLevel | None = None
        if self.size > 1:
            number = -1 if memory is None else memory.next_flag_set(of_group=True)
            numbers = channel.comm.allgather(number)
            if memory is not None and min(numbers) >= 0:
                sets = list(zip(places, numbers, strict=True))
                flags = SharedFlags(memory, self.rank, sets, channel.group)
                self._levels = TwoLevel(flags, channel, topology)
                self._chunk_bytes = STAGED.chunk_bytes
                channel.window = STAGED
        self.checks = self._levels is not None
        """Whether ranks compare the fingerprints of all operations."""

    @property
    def position(self) -> int:
        """How much has been begun; equal on all ranks of a group without work under way."""
        return (
            self.channel.num_tags
            + self.channel.num_chunks
            + (self._levels.flags.num_tasks if self._levels else 0)
        )

    def move(
        self,
        outgoing: Blocks,
        incoming: Blocks,
        fingerprint: int,
        reduction: Reduction | None = None,
        in_chunks: bool = True,
    ) -> Work[None]:
        """Send each rank its block, and receive a block from each. With a reduction, all blocks for
        this rank are combined into its own incoming block; None: it wants no result.

        In chunks only if all blocks have one size, or every rank knows those of all.
        """
        blocks = [block for block in (*outgoing, *incoming) if block is not None]
        largest = max((block.nbytes for block in blocks), default=0)
        if (
            reduction is not None
            and len({id(block) for block in outgoing if block is not None}) > 1
        ):
            largest *= self.size  # one block per rank
        count = max(1, -(-largest // self._chunk_bytes)) if in_chunks else 1
        item = 1 if reduction is None else reduction.item_bytes
        arriving, result = list(incoming), incoming[self.rank]
        levels = self._levels
        if levels is None and reduction is not None and result is not None:
            arriving = [np.empty(result.nbytes, np.uint8) for _ in incoming]
        tasks: list[Task] = []
        for index in range(count):
            sent = _pieces(outgoing, index, count, item)
            received = _pieces(arriving, index, count, item)
            if levels is not None:
                tasks.append(MoveTask(levels.flags, fingerprint, sent, received, reduction))
            else:
                nbytes = sum(block.nbytes for block in (*sent, *received) if block is not None)
                begin = partial(
                    begin_messages, channel=self.channel, outgoing=sent, incoming=received
                )
                tasks.append(TransferTask(nbytes, begin))
        if levels is not None or reduction is None or result is None:
            return self._submit(tasks)
        shards = [block for block in arriving if block is not None]
        return self._submit(tasks, partial(reduction, shards, result))

    def all_reduce(self, data: Buffer, reduction: Reduction, fingerprint: int) -> Work[None]:
        """Combine ``data`` over all ranks, in place."""
        levels, item = self._levels, reduction.item_bytes
        if levels is None and reduction.function is None:
            dtype = reduction.dtype
            return self.backend.all_reduce(typed(data, dtype), dtype, reduction.op)
        if levels is None or data.nbytes <= SMALL_BYTES:
            place = [data if rank == self.rank else None for rank in range(self.size)]
            return self.move([data] * self.size, place, fingerprint, reduction)
        return self._submit(
            [
                levels.staged(data[start * item : stop * item], item, reduction, fingerprint)
                for start, stop in chunks(data.nbytes // item, item, self._chunk_bytes)
            ]
        )

    # Messages between two ranks: a header, and the data in pieces with a tag of its own.

    @property
    def largest_tag(self) -> int:
        """The largest tag of messages; the smallest is 0."""
        return (self.channel.comm.Get_attr(self.channel.mpi.TAG_UB) or 0) - _HEADER_TAG - 1

    def send(self, header: str, data: Buffer, peer: int, tag: int) -> list[MPI.Request]:
        """Send a message; its memory must outlive the requests."""
        channel = self.channel
        self.undelivered += 1
        head = encode([tag, header])
        return [
            channel.comm.Isend([head, channel.mpi.BYTE], peer, _HEADER_TAG),
            *self._data(channel.comm.Isend, data, peer, tag),
        ]

    def next_header(self) -> tuple[int, int, str] | None:
        """Source, tag and header of the next message that has arrived, of any tag."""
        # One question to MPI, however many messages are expected.
        mpi, status = self.channel.mpi, self._status
        arrived = self.channel.comm.Improbe(mpi.ANY_SOURCE, _HEADER_TAG, status)
        if arrived is None:
            return None
        source, head = status.Get_source(), bytearray(status.Get_count(mpi.BYTE))
        arrived.Recv([head, mpi.BYTE])
        tag, header = decode(bytes(head))
        return source, tag, header

    def receive(self, data: Buffer, source: int, tag: int) -> list[MPI.Request]:
        """Receive the data of the source's oldest message with this tag that was not received."""
        self.undelivered -= 1
        return self._data(self.channel.comm.Irecv, data, source, tag)

    def test(self, requests: list[MPI.Request]) -> bool:
        """Whether any of these has ended now; they are empty then."""
        return bool(requests and self.channel.mpi.Request.Testsome(requests))

    def _data(
        self, begin: Callable[..., MPI.Request], data: Buffer, peer: int, tag: int
    ) -> list[MPI.Request]:
        byte, first = self.channel.mpi.BYTE, _HEADER_TAG + 1
        return [begin([piece, byte], peer, first + tag) for piece in split_message(data)]

    def _submit(
        self, tasks: Sequence[Task], finish: Callable[[], None] | None = None
    ) -> Work[None]:
        return self.channel.submit(sum(task.nbytes for task in tasks), tasks, finish)


def _pieces(blocks: Blocks, index: int, count: int, item: int = 1) -> list[Buffer | None]:
    """One of ``count`` parts of each block; one piece for a block that is listed several times."""
    cut: dict[int, Buffer] = {}
    for block in blocks:
        if block is not None and id(block) not in cut:
            numel = block.nbytes // item
            start, stop = numel * index // count, numel * (index + 1) // count
            cut[id(block)] = block[start * item : stop * item]
    return [None if block is None else cut[id(block)] for block in blocks]

"""Collectives on ordinary memory among some of the ranks, for the backend of ``torch.distributed``.

On one host each rank copies its part of a chunk into a staging buffer that its peers can read, and
publishes the buffer's offset (READY). It takes what it needs from theirs (TAKEN). An all-reduce of
more than :data:`SMALL_BYTES` combines one shard per rank in between (REDUCED). Between hosts, ranks
send messages directly. Either way the ranks that take part make the communicator alone.

The staging buffers also carry a *fingerprint* of the operation, so that ranks in different
operations notice before they read each other's data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from wfbp import native
from wfbp.comm.arrays import Buffer, combine, split, typed
from wfbp.comm.backend import Work
from wfbp.comm.mpi.shm_memory import SharedMemory
from wfbp.comm.mpi.transfers import NUM_TAGS, Channel, Chunking, Task, TransferTask, Watch, chunks
from wfbp.comm.mpi.two_level import READY, REDUCED, TAKEN, WAITING, FlaggedTask, SharedFlags
from wfbp.core.types import Op

if TYPE_CHECKING:
    from mpi4py import MPI

    from wfbp.comm.mpi.mpi_backend import MpiBackend

STAGED = Chunking(chunk_bytes=2 << 20, window_bytes=8 << 20)
"""Chunks that stay in a core's cache; several, because a rank may wait for its core."""
SMALL_BYTES = 64 << 10
"""All-reduces of up to this size are combined by every rank as a whole."""

_ENTRY_BYTES = 16
PIECE_BYTES = 64 << 20
"""Longer messages travel in pieces: MPI's functions count bytes by an int."""
_HEADER_TAG = 2 * NUM_TAGS
"""MPI's tag of the headers of messages. Their data have larger tags, collectives smaller ones."""

Blocks = Sequence[Buffer | None]
"""One block of bytes per rank, or nothing."""


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


class _StagedTask(FlaggedTask):
    """One chunk through staging buffers; subclasses fill this rank's and read the others'."""

    slot_bytes: int

    def __init__(self, flags: SharedFlags, fingerprint: int) -> None:
        super().__init__(flags)
        self._fingerprint = fingerprint
        self._slot: Buffer | None = None

    def start(self) -> None:
        if self.slot_bytes:
            self._slot = self._flags.memory.take(self.slot_bytes)
            self._fill(self._slot)
        self._publish(self._slot, self._fingerprint)

    def step(self) -> bool:
        flags = self._flags
        if self._phase == WAITING and not self._publish(self._slot, self._fingerprint):
            return False
        if self._phase == READY:
            if not self._all_reached(READY):
                return False
            notes = [flags.words[peer][self._row + 2] for peer in flags.peers]
            if any(note != self._fingerprint for note in notes):
                self.work.mismatch = True  # the waiting thread abandons the whole channel
                return False
            self._read_ready()
            if self.work.mismatch:
                return False
        if self._phase == REDUCED and not self._read_reduced():
            return False
        if not self._all_reached(TAKEN):
            return False
        if self._slot is not None:
            flags.memory.give(self._slot)
        return True

    def awaited(self) -> Watch | None:
        if self._phase in (WAITING, REDUCED):
            return None
        return self._watch(self._flags.peers)

    def _fill(self, slot: Buffer) -> None:
        """Copy this rank's part into its staging buffer."""

    def _read_ready(self) -> None:
        """All ranks are READY: read, and enter the next phase."""
        raise NotImplementedError

    def _read_reduced(self) -> bool:
        """Read what ranks have reduced so far; True, in the phase TAKEN, once that is all."""
        raise NotImplementedError


class _MoveTask(_StagedTask):
    """Blocks from every rank to every rank. With a reduction, those for this rank are combined into
    its own incoming block, if it has one.

    A staging buffer starts with the offset and the size of the block for each rank. A block that
    goes to several ranks is copied once.
    """

    def __init__(
        self,
        flags: SharedFlags,
        fingerprint: int,
        outgoing: Blocks,
        incoming: Blocks,
        reduction: Reduction | None,
    ) -> None:
        super().__init__(flags, fingerprint)
        self._incoming, self._reduction = incoming, reduction
        self._own = outgoing[flags.rank]
        end = _ENTRY_BYTES * len(outgoing)
        self._table = np.zeros((len(outgoing), 2), np.int64)
        self._parts: dict[int, tuple[int, Buffer]] = {}
        for rank, block in enumerate(outgoing):
            if block is None or rank == flags.rank:
                continue
            if id(block) not in self._parts:
                self._parts[id(block)] = end, block
                end += -(-block.nbytes // 8) * 8  # aligned for every element type
            self._table[rank] = self._parts[id(block)][0], block.nbytes
        self.slot_bytes = end if self._parts else 0
        received = sum(block.nbytes for block in incoming if block is not None)
        self.nbytes = max(end, received if reduction is None else received * len(incoming))

    def _fill(self, slot: Buffer) -> None:
        slot[: self._table.nbytes] = self._table.reshape(-1).view(np.uint8)
        for start, block in self._parts.values():
            slot[start : start + block.nbytes] = block

    def _read_ready(self) -> None:
        result, reduction = self._incoming[self._flags.rank], self._reduction
        wanted = self._incoming if reduction is None else [result] * len(self._incoming)
        pairs = [
            (place, self._block_of(peer)) for peer, place in enumerate(wanted) if place is not None
        ]
        if any(place.nbytes != block.nbytes for place, block in pairs):
            self.work.mismatch = True
            return
        if reduction is None:
            for place, block in pairs:
                place[:] = block
        elif result is not None:
            reduction([block for _, block in pairs], result)
        self._enter(TAKEN)

    def _block_of(self, peer: int) -> Buffer:
        """The block of a rank for this one, where it is."""
        if peer == self._flags.rank:
            assert self._own is not None
            return self._own
        entry = self._view(peer, _ENTRY_BYTES * self._flags.rank, _ENTRY_BYTES)
        start, nbytes = entry.view(np.int64).tolist()
        return self._view(peer, start, nbytes)


class _ReduceTask(_StagedTask):
    """All-reduce of one chunk, in place: each rank combines a shard and takes the others'."""

    def __init__(
        self,
        flags: SharedFlags,
        fingerprint: int,
        data: Buffer,
        reduction: Reduction,
    ) -> None:
        super().__init__(flags, fingerprint)
        item = reduction.item_bytes
        self.nbytes = self.slot_bytes = data.nbytes
        self._data, self._reduction = data, reduction
        bounds = split(data.nbytes // item, len(flags.places))
        self._shards = [(start * item, stop * item) for start, stop in bounds]
        self._missing = list(flags.peers)

    def _fill(self, slot: Buffer) -> None:
        start, stop = self._shards[self._flags.rank]
        slot[:start] = self._data[:start]  # the own shard is combined from where it is
        slot[stop : self._data.nbytes] = self._data[stop:]

    def _read_ready(self) -> None:
        me, slot = self._flags.rank, self._slot
        assert slot is not None
        start, stop = self._shards[me]
        mine = self._data[start:stop]
        self._reduction([self._shard(rank, me) for rank in range(len(self._shards))], mine)
        slot[start:stop] = mine
        self._enter(REDUCED)

    def _read_reduced(self) -> bool:
        for peer in list(self._missing):
            if self._reached(peer, REDUCED):
                start, stop = self._shards[peer]
                self._data[start:stop] = self._shard(peer, peer)
                self._missing.remove(peer)
        if self._missing:
            return False
        self._enter(TAKEN)
        return True

    def _shard(self, rank: int, owner: int) -> Buffer:
        start, stop = self._shards[owner]
        if rank == self._flags.rank:
            return self._data[start:stop]
        return self._view(rank, start, stop - start)


def begin_messages(
    _: Task, channel: Channel, outgoing: Blocks, incoming: Blocks
) -> native.Transfer:
    """Send blocks from every rank to every rank."""
    messages = []
    own, place = outgoing[channel.rank], incoming[channel.rank]
    if own is not None and place is not None:
        place[:] = own
    for arrives, blocks in ((True, incoming), (False, outgoing)):
        for peer in channel.peers:
            block = blocks[peer]
            if block is not None and block.nbytes:
                messages += [(piece, peer, arrives) for piece in split_message(block)]
    return channel.group.transfers.begin(channel.handle, channel.next_tag(), messages)


def split_message(data: Buffer) -> list[Buffer]:
    """The pieces in which a message travels, at least one."""
    data = data.view(np.uint8)
    return [
        data[start : start + PIECE_BYTES] for start in range(0, max(data.nbytes, 1), PIECE_BYTES)
    ]


class Exchange:
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
        chunk_bytes: int,
        ranks: Sequence[int],
    ) -> None:
        self.backend, self.channel, self.ranks = backend, channel, tuple(ranks)
        self.rank, self.size = backend.rank, backend.size
        self.undelivered = 0
        """Messages sent less those received; 0 in sum over all ranks if none is under way."""
        self._status = channel.mpi.Status()
        self._chunk_bytes = chunk_bytes
        self._flags: SharedFlags | None = None
        if self.size > 1:
            number = -1 if memory is None else memory.next_flag_set(of_group=True)
            numbers = channel.comm.allgather(number)
            if memory is not None and min(numbers) >= 0:
                sets = list(zip(places, numbers, strict=True))
                self._flags = SharedFlags(memory, self.rank, sets, channel.group)
                self._chunk_bytes = STAGED.chunk_bytes
                channel.window = STAGED
        self.checks = self._flags is not None
        """Whether ranks compare the fingerprints of all operations."""

    @property
    def position(self) -> int:
        """How much has been begun; equal on all ranks of a group without work under way."""
        return (
            self.channel.num_tags
            + self.channel.num_chunks
            + (self._flags.num_tasks if self._flags else 0)
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
        flags = self._flags
        if flags is None and reduction is not None and result is not None:
            arriving = [np.empty(result.nbytes, np.uint8) for _ in incoming]
        tasks: list[Task] = []
        for index in range(count):
            sent = _pieces(outgoing, index, count, item)
            received = _pieces(arriving, index, count, item)
            if flags is not None:
                tasks.append(_MoveTask(flags, fingerprint, sent, received, reduction))
            else:
                nbytes = sum(block.nbytes for block in (*sent, *received) if block is not None)
                begin = partial(
                    begin_messages, channel=self.channel, outgoing=sent, incoming=received
                )
                tasks.append(TransferTask(nbytes, begin))
        if flags is not None or reduction is None or result is None:
            return self._submit(tasks)
        shards = [block for block in arriving if block is not None]
        return self._submit(tasks, partial(reduction, shards, result))

    def all_reduce(self, data: Buffer, reduction: Reduction, fingerprint: int) -> Work[None]:
        """Combine ``data`` over all ranks, in place."""
        flags, item = self._flags, reduction.item_bytes
        if flags is None and reduction.function is None:
            dtype = reduction.dtype
            return self.backend.all_reduce(typed(data, dtype), dtype, reduction.op)
        if flags is None or data.nbytes <= SMALL_BYTES:
            place = [data if rank == self.rank else None for rank in range(self.size)]
            return self.move([data] * self.size, place, fingerprint, reduction)
        return self._submit(
            [
                _ReduceTask(flags, fingerprint, data[start * item : stop * item], reduction)
                for start, stop in chunks(data.nbytes // item, item, self._chunk_bytes)
            ]
        )

    # Messages between two ranks: a header, and the data in pieces with a tag of its own.

    @property
    def largest_tag(self) -> int:
        """The largest tag of messages; the smallest is 0."""
        return (self.channel.comm.Get_attr(self.channel.mpi.TAG_UB) or 0) - _HEADER_TAG - 1

    def send(self, header: bytes, data: Buffer, peer: int, tag: int) -> list[MPI.Request]:
        """Send a message; its memory must outlive the requests."""
        channel = self.channel
        self.undelivered += 1
        head = b"%d %b" % (tag, header)
        return [
            channel.comm.Isend([head, channel.mpi.BYTE], peer, _HEADER_TAG),
            *self._data(channel.comm.Isend, data, peer, tag),
        ]

    def next_header(self) -> tuple[int, int, bytes] | None:
        """Source, tag and header of the next message that has arrived, of any tag."""
        # One question to MPI, however many messages are expected.
        mpi, status = self.channel.mpi, self._status
        arrived = self.channel.comm.Improbe(mpi.ANY_SOURCE, _HEADER_TAG, status)
        if arrived is None:
            return None
        source, head = status.Get_source(), bytearray(status.Get_count(mpi.BYTE))
        arrived.Recv([head, mpi.BYTE])
        tag, _, header = bytes(head).partition(b" ")
        return source, int(tag), header

    def receive(self, data: Buffer, source: int, tag: int) -> list[MPI.Request]:
        """Receive the data of the source's oldest message with this tag that was not received."""
        self.undelivered -= 1
        return self._data(self.channel.comm.Irecv, data, source, tag)

    def test(self, requests: list[MPI.Request]) -> bool:
        """Whether any of these has ended now; they are empty then."""
        return bool(requests and self.channel.mpi.Request.Testsome(requests))

    def _data(self, begin: Any, data: Buffer, peer: int, tag: int) -> list[MPI.Request]:
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

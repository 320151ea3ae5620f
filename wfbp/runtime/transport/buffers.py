"""Fusion buffers on the host: where the tensors of each group lie while they travel.

Copying small tensors into one buffer shares a message's start-up. For a large tensor the copy costs
more than a message of its own, so the backend sends it from where it lies. Large tensors come first
in a buffer, so that the small ones and the flags behind them stay one piece. Decoupled groups
travel as shards: each rank gets one part of every tensor, and all ranks' parts lie one behind the
other in the buffer.

All tensors of a compressed group are cast while they are packed, and cast back to memory beside the
message when they have arrived: plans, shards and results are of the gradients' type, only the
message is of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np

from wfbp import native
from wfbp.comm.backend import Backend, Buffer, Segment, Work, storage_dtype, zeroed
from wfbp.comm.device.device import SlotTable
from wfbp.core.plan import Plan, aligned, layout
from wfbp.core.types import Op, TensorSpec, item_bytes
from wfbp.runtime.step import GatherRequest, Step
from wfbp.runtime.transport.flags import FlagCodec, GroupFlags


class BufferLayout:
    """Where a group's tensors lie in a buffer, or in each of its blocks.

    Args:
        places: bytes that each tensor takes there.
        nbytes: bytes of each tensor.
        zero_copy_min_bytes: size from which a tensor is large.

    Example:
        >>> layout = BufferLayout([8, 1024, 40], [8, 1024, 40], 256)
        >>> layout.large, layout.small, layout.offsets
        ([1], [0, 2], [1024, 0, 1040])
    """

    def __init__(
        self, places: Sequence[int], nbytes: Sequence[int], zero_copy_min_bytes: int
    ) -> None:
        self.large = [k for k, size in enumerate(nbytes) if size >= zero_copy_min_bytes]
        """Positions of the tensors that are not packed."""
        self.small = [k for k, size in enumerate(nbytes) if size < zero_copy_min_bytes]
        """Positions of the others."""
        order = self.large + self.small
        starts, self.end = layout([places[k] for k in order])
        self.offsets = [0] * len(order)
        for position, start in zip(order, starts, strict=True):
            self.offsets[position] = start


class _Memory:
    """Memory at an address, as NumPy wants it described."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def memory_at(address: int, nbytes: int, owner: object) -> Buffer:
    """The bytes at an address, which keep their owner alive; zeros for address 0."""
    if not address:
        return np.zeros(nbytes, np.uint8)
    return np.asarray(_Memory(address, nbytes, owner))


_LINE_BYTES = 64


class _Storage:
    """Memory in which a group's tensors lie, with its flags behind them."""

    def __init__(
        self, offsets: Sequence[int], nbytes: Sequence[int], flags: int, dtype: str, end: int,
        backend: Backend | None,
    ) -> None:  # fmt: skip
        width = item_bytes(dtype)
        self.bytes = aligned_bytes(end + flags * width, backend)
        self.buffer: Buffer = self.bytes.view(storage_dtype(dtype))
        self.tail = self.buffer[end // width :]
        self.address: int = self.bytes.__array_interface__["data"][0]
        self.copies_segments = backend is not None and backend.copies_segments(self.buffer)
        self.slots = frozenset(
            self.address + start for start, size in zip(offsets, nbytes, strict=True) if size
        )
        self.table = native.PackTable(
            self.bytes,
            np.asarray(offsets, dtype=np.int64),
            np.asarray(nbytes, dtype=np.int64),
            dtype,
        )


class FusionBuffer:
    """Storage of one all-reduced group, and the packing into it.

    Used by one thread at a time; the views of its tensors belong to the training thread between the
    completion of the group and the next step's first gradient.

    Results are never written over a gradient of this rank, which may still grow, and be sent again.
    If a program accumulates into the result of the step before, the buffer moves to other storage,
    and back again in the step after.

    Args:
        plan: what to send.
        group: index of the group.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        size: number of ranks.
        zero_copy_min_bytes: tensors of at least this size are not packed.
        backend: that will send, where it is known.

    Attributes:
        num_moves: how often the buffer has moved to other storage, with all slots.
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        op: Op,
        size: int,
        zero_copy_min_bytes: int,
        backend: Backend | None = None,
    ) -> None:
        self.dtype = plan.dtype(group)
        self._op = op
        self._flags = FlagCodec(plan, group)
        self._members = plan.groups[group].tensors
        self._nbytes = [plan.tensors[k].nbytes for k in self._members]
        buffer_layout = BufferLayout(self._nbytes, self._nbytes, zero_copy_min_bytes)
        self._offsets = buffer_layout.offsets
        self._large = buffer_layout.large
        self._segments: list[Segment] = []
        self._end = aligned(buffer_layout.end)
        self._backend = backend
        self._delivered: set[int] = set()
        self.num_moves = 0
        self._storage = self._made()
        self._other: _Storage | None = None

    def _made(self) -> _Storage:
        return _Storage(
            self._offsets, self._nbytes, self._flags.count, self.dtype, self._end, self._backend
        )

    @property
    def buffer(self) -> Buffer:
        """What is sent: the tensors and the flags, as elements."""
        return self._storage.buffer

    def slot(self, position: int) -> Buffer:
        """The bytes of the group's tensor at ``position``, as uint8."""
        start = self._offsets[position]
        return self._storage.bytes[start : start + self._nbytes[position]]

    def _make_way(self, sources: Sequence[int]) -> None:
        """Go to storage in which none of these gradients lies."""
        other = self._other
        if other is None or not other.slots.isdisjoint(sources):
            other = self._made()  # gradients in the one before keep that alive
        self._other, self._storage = self._storage, other
        self.num_moves += 1

    def pack(self, step: Step) -> None:
        """Copy small tensors, and note where the large ones lie; zeros for what is absent.

        Memory without an owner may be freed where a step fails. It is copied too, unless the
        backend would not read it afterwards; then results go to their targets, if these are known
        by now.
        """
        sources = [step.addresses[k] for k in self._members]
        if not self._storage.slots.isdisjoint(sources):
            self._make_way(sources)
        storage = self._storage
        flags = self._flags.values(sources, step.requested, step.number, step.discards)
        self._delivered.clear()
        for position in self._large:
            k = self._members[position]
            offset, nbytes = self._offsets[position], self._nbytes[position]
            slot = storage.address + offset
            data = self.slot(position)
            owner = step.owners[k]
            if sources[position] and (storage.copies_segments or owner is not None):
                data = memory_at(sources[position], nbytes, owner)
                sources[position] = slot
            result = None
            if storage.copies_segments and step.targets and step.targets[k]:
                result = memory_at(step.targets[k], nbytes, None)
                self._delivered.add(k)
            self._segments.append(Segment(offset, data, (), result))
        storage.table.pointers[:] = sources
        storage.table.pack()
        storage.tail[:] = flags

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy the tensors to these addresses, by tensor of the plan; 0 for none.

        Those that the backend has delivered are there already.
        """
        table = self._storage.table
        table.pointers[:] = [0 if k in self._delivered else addresses[k] for k in self._members]
        table.unpack()

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it; called once after each :meth:`pack`."""
        segments, self._segments = self._segments, []
        return backend.all_reduce(self.buffer, self.dtype, self._op, segments)

    def arrived(self, step: int) -> GroupFlags:
        """Read the flags of the reduced message; ``step`` is this rank's step number."""
        return self._flags.read(self._storage.tail, step)


class _Results:
    """Memory for the results of a compressed group."""

    def __init__(self, offsets: Sequence[int], nbytes: Sequence[int], end: int) -> None:
        self._places = [
            slice(start, start + size) for start, size in zip(offsets, nbytes, strict=True)
        ]
        self._bytes = aligned_bytes(end)
        address: int = self._bytes.__array_interface__["data"][0]
        self.addresses = [address + start for start in offsets]
        self.slots = frozenset(
            start for start, size in zip(self.addresses, nbytes, strict=True) if size
        )

    def slot(self, position: int) -> Buffer:
        """The bytes of the tensor at ``position``, as uint8."""
        return self._bytes[self._places[position]]


class CastFusionBuffer:
    """Storage of one all-reduced group that travels as ``wire_dtype``; otherwise a
    ``FusionBuffer``.

    Results are cast to memory beside the message, of which there are two in turns, for the same
    reason.
    """

    def __init__(
        self, plan: Plan, group: int, op: Op, wire_dtype: str, backend: Backend | None = None
    ) -> None:
        self.dtype = wire_dtype
        self._op = op
        self._flags = FlagCodec(plan, group, wire_dtype)
        self._members = plan.groups[group].tensors
        specs = [plan.tensors[k] for k in self._members]
        self._nbytes = [spec.nbytes for spec in specs]
        self._offsets, self._end = layout(self._nbytes)
        wire_bytes = [spec.wire_bytes(wire_dtype) for spec in specs]
        offsets, end = layout(wire_bytes)
        end = aligned(end)
        width = item_bytes(wire_dtype)
        message = aligned_bytes(end + self._flags.count * width, backend)
        self.buffer: Buffer = message.view(storage_dtype(wire_dtype))
        """What is sent: the tensors and the flags, as elements."""
        self._tail = self.buffer[end // width :]
        self._table = native.PackTable(
            message,
            np.asarray(offsets, dtype=np.int64),
            np.asarray(wire_bytes, dtype=np.int64),
            wire_dtype,
            plan.dtype(group),
        )
        self.num_moves = 0
        self._results = self._made()
        self._other: _Results | None = None

    def _made(self) -> _Results:
        return _Results(self._offsets, self._nbytes, self._end)

    def slot(self, position: int) -> Buffer:
        """The bytes of the group's tensor at ``position``, as uint8."""
        return self._results.slot(position)

    def pack(self, step: Step) -> None:
        """Cast all tensors; zeros for what is absent."""
        sources = [step.addresses[k] for k in self._members]
        if not self._results.slots.isdisjoint(sources):  # as in a ``FusionBuffer``
            other = self._other
            if other is None or not other.slots.isdisjoint(sources):
                other = self._made()
            self._other, self._results = self._results, other
            self.num_moves += 1
        self._table.pointers[:] = sources
        self._table.pack()
        self._tail[:] = self._flags.values(sources, step.requested, step.number, step.discards)

    def unpack(self, addresses: Sequence[int]) -> None:
        """Cast the tensors to these addresses, indexed by tensor; 0: not that one."""
        self._table.pointers[:] = [addresses[k] for k in self._members]
        self._table.unpack()

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it; called once after each :meth:`pack`."""
        return backend.all_reduce(self.buffer, self.dtype, self._op)

    def arrived(self, step: int) -> GroupFlags:
        """Cast the results back, and read the flags."""
        self._table.pointers[:] = self._results.addresses
        self._table.unpack()
        return self._flags.read(self._tail, step)


def aligned_bytes(size: int, backend: Backend | None = None) -> Buffer:
    """Zeroed bytes that start at a cache line, in memory that the backend prefers."""
    size_of_all = size + _LINE_BYTES
    raw = zeroed(size_of_all) if backend is None else backend.zeros(size_of_all)
    start = -raw.__array_interface__["data"][0] % _LINE_BYTES
    return raw[start : start + size]


def shard_bytes(spec: TensorSpec, size: int) -> int:
    """Bytes of the first and largest shard of a tensor, a multiple of the alignment.

    >>> shard_bytes(TensorSpec("w", (10,), "float32"), 2)
    32
    """
    equal = -(-spec.numel // size) * item_bytes(spec.dtype)
    return aligned(equal)


def shard_range(spec: TensorSpec, rank: int, size: int) -> tuple[int, int]:
    """First byte of a rank's shard in its tensor, and the byte behind its last.

    >>> spec = TensorSpec("w", (10,), "float32")
    >>> [shard_range(spec, rank, 3) for rank in range(3)]
    [(0, 16), (16, 32), (32, 40)]
    """
    length = shard_bytes(spec, size)
    return min(rank * length, spec.nbytes), min((rank + 1) * length, spec.nbytes)


MakeTable = Callable[[Buffer, Sequence[int], Sequence[int], str, str], SlotTable]
"""Makes the table that copies a buffer's slots: the buffer, the slots' offsets and bytes in it, its
element type, and that of the tensors."""


class ShardBlocks:
    """The layout of a group's shards in one buffer, all ranks' blocks behind each other.

    Args:
        allocate: makes a buffer of so many bytes.
        make_table: makes the tables that copy shards.
        zero_copy_min_bytes: tensors of at least this size are not packed; None to pack all.
        tail_bytes: left free at the end of each block.
        wire_dtype: the type of the shards there, if not the group's; all are packed then.
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        size: int,
        allocate: Callable[[int], Buffer],
        make_table: MakeTable,
        zero_copy_min_bytes: int | None = None,
        tail_bytes: int = 0,
        wire_dtype: str = "",
    ) -> None:
        self.members = plan.groups[group].tensors
        self._tensor_dtype = plan.dtype(group)
        self.dtype = wire_dtype or self._tensor_dtype
        self.casts = self.dtype != self._tensor_dtype
        self._specs = [plan.tensors[k] for k in self.members]
        self._size = size
        self._make_table = make_table
        in_block = [self._in_block(shard_bytes(spec, size)) for spec in self._specs]
        nbytes = [spec.nbytes for spec in self._specs]
        if self.casts or zero_copy_min_bytes is None:
            zero_copy_min_bytes = max(nbytes) + 1
        buffer_layout = BufferLayout(in_block, nbytes, zero_copy_min_bytes)
        self._offsets, self._small = buffer_layout.offsets, buffer_layout.small
        self._large = [
            (k, [stop - start for start, stop in self._ranges_of(k)]) for k in buffer_layout.large
        ]
        self.tail = aligned(buffer_layout.end)
        self.block_bytes = aligned(self.tail + tail_bytes)
        self.counts = [self.block_bytes] * size
        self.bytes = allocate(self.block_bytes * size)

    def _in_block(self, nbytes: int) -> int:
        """Bytes that so many of a tensor take in a block."""
        return nbytes // item_bytes(self._tensor_dtype) * item_bytes(self.dtype)

    def block(self, rank: int) -> Buffer:
        """A rank's block."""
        return self.bytes[rank * self.block_bytes : (rank + 1) * self.block_bytes]

    def _ranges_of(self, position: int) -> list[tuple[int, int]]:
        """The bytes of all ranks' shards in one tensor."""
        spec = self._specs[position]
        return [shard_range(spec, rank, self._size) for rank in range(self._size)]

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The bytes of a rank's shards in their tensors."""
        return [shard_range(spec, rank, self._size) for spec in self._specs]

    def result_layout(self, rank: int) -> tuple[Sequence[int], list[int], int]:
        """Where a rank's shards lie in a buffer of their own type: offsets, bytes, and the end."""
        nbytes = [stop - start for start, stop in self.ranges(rank)]
        offsets, end = layout(nbytes)
        return offsets, nbytes, end

    def shard(self, position: int, rank: int) -> Buffer:
        """The bytes of a rank's shard of the group's tensor at ``position``."""
        start, stop = shard_range(self._specs[position], rank, self._size)
        offset = rank * self.block_bytes + self._offsets[position]
        return self.bytes[offset : offset + self._in_block(stop - start)]

    def segments(self, addresses: Sequence[int], owners: Sequence[object]) -> list[Segment]:
        """The large tensors where they lie; zeros for those at address 0."""
        segments = []
        for position, counts in self._large:
            k = self.members[position]
            data = memory_at(addresses[k], self._specs[position].nbytes, owners[k])
            segments.append(Segment(self._offsets[position], data, counts))
        return segments

    def table(self, ranks: Sequence[int]) -> ShardTable:
        """A table of some ranks' shards of the small tensors."""
        offsets, nbytes, starts = [], [], []
        for rank in ranks:
            for position in self._small:
                start, stop = shard_range(self._specs[position], rank, self._size)
                offsets.append(rank * self.block_bytes + self._offsets[position])
                nbytes.append(self._in_block(stop - start))
                starts.append(start)
        table = self._make_table(self.bytes, offsets, nbytes, self.dtype, self._tensor_dtype)
        return ShardTable(
            table, [self.members[position] for position in self._small], starts, len(ranks)
        )

    def unpacked_by(self, rank: int) -> list[int]:
        """The ranks whose blocks a rank unpacks from an all-gather: its own, too, if it was cast,
        or it would have other bits than the others."""
        return [r for r in range(self._size) if self.casts or r != rank]

    def whole_tensors(self, num_tensors: int, rank: int, addresses: Sequence[int]) -> list[int]:
        """Where whole tensors would begin whose shards of a rank lie at these addresses."""
        whole = [0] * num_tensors
        for k, address, (start, _) in zip(self.members, addresses, self.ranges(rank), strict=True):
            whole[k] = address - start
        return whole


def picker(indices: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function that gives the values at these indices.

    Example:
        >>> picker([2, 0])([5, 6, 7])
        (7, 5)
    """
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[k] for k in indices)


def _host_table(
    buffer: Buffer, offsets: Sequence[int], nbytes: Sequence[int], dtype: str, tensor_dtype: str
) -> SlotTable:
    return native.PackTable(
        buffer,
        np.asarray(offsets, dtype=np.int64),
        np.asarray(nbytes, dtype=np.int64),
        dtype,
        tensor_dtype,
    )


class ShardTable:
    """Copies shards between tensors and their places in a buffer.

    Args:
        table: of the places, those of one rank after those of another.
        members: the tensors of each rank's places.
        starts: per place, where its shard begins in its tensor.
        times: number of ranks.
    """

    def __init__(
        self, table: SlotTable, members: Sequence[int], starts: Sequence[int], times: int
    ) -> None:
        self._table = table
        self._pick = picker(members)
        self._pointed: tuple[int, ...] | None = None
        self._starts = np.asarray(starts, dtype=np.int64)
        self._times = times

    def pack(self, addresses: Sequence[int]) -> None:
        """Fill the buffer from the tensors at these addresses, indexed by tensor; 0: zeros."""
        self._point(addresses)
        self._table.pack()

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy from the buffer to the tensors at these addresses, indexed by tensor."""
        self._point(addresses)
        self._table.unpack()

    def _point(self, addresses: Sequence[int]) -> None:
        own = self._pick(addresses)
        if own == self._pointed:  # as in most steps, since allocators give out the same memory
            return
        self._pointed = own
        bases = np.tile(np.asarray(own, dtype=np.int64), self._times)
        self._table.pointers[:] = np.where(bases == 0, 0, bases + self._starts)


class ScatterBuffer:
    """Storage of one reduce-scattered group; the counterpart of ``FusionBuffer``.

    If it travels as another ``wire_dtype``, this rank's shard is cast back to memory beside the
    message.
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        op: Op,
        rank: int,
        size: int,
        zero_copy_min_bytes: int,
        wire_dtype: str = "",
    ) -> None:
        self.num_moves = 0
        self._op = op
        self._rank = rank
        self.dtype = wire_dtype or plan.dtype(group)
        self._flags = FlagCodec(plan, group, self.dtype)
        tail_bytes = self._flags.count * item_bytes(self.dtype)
        self._blocks = blocks = ShardBlocks(
            plan,
            group,
            size,
            aligned_bytes,
            _host_table,
            zero_copy_min_bytes,
            tail_bytes,
            self.dtype,
        )
        self._table = blocks.table(range(size))
        self._results: _Results | None = None
        if blocks.casts:
            self._results = results = _Results(*blocks.result_layout(rank))
            self._own = blocks.table([rank])
            self._targets = blocks.whole_tensors(len(plan.tensors), rank, results.addresses)
        end = blocks.tail + tail_bytes
        self._tails = [
            blocks.block(r)[blocks.tail : end].view(storage_dtype(self.dtype)) for r in range(size)
        ]

    def slot(self, position: int) -> Buffer:
        """The bytes of this rank's shard of the group's tensor at ``position``, as uint8."""
        if self._results is not None:
            return self._results.slot(position)
        return self._blocks.shard(position, self._rank)

    def pack(self, step: Step) -> None:
        """Copy small tensors, and note where the large ones lie; zeros for what is absent."""
        self._table.pack(step.addresses)
        self._segments = self._blocks.segments(step.addresses, step.owners)
        sources = [step.addresses[k] for k in self._blocks.members]
        flags = self._flags.values(sources, step.requested, step.number, step.discards)
        for tail in self._tails:
            tail[:] = flags

    def unpack(self, addresses: Sequence[int]) -> None:
        """Nothing: shards stay where they are."""

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it, each rank its block; called once after each :meth:`pack`."""
        blocks = self._blocks
        data = blocks.bytes.view(storage_dtype(self.dtype))
        segments, self._segments = self._segments, []
        return backend.reduce_scatter(data, blocks.counts, self.dtype, self._op, segments)

    def arrived(self, step: int) -> GroupFlags:
        """Read the flags of the reduced message, as ``FusionBuffer.arrived``."""
        if self._results is not None:
            self._own.unpack(self._targets)
        return self._flags.read(self._tails[self._rank], step)


class GatherBuffer:
    """Storage of one all-gathered group; tensors of at least ``zero_copy_min_bytes`` are not
    packed.

    If it travels as another ``wire_dtype``, all are, and every rank has what has travelled.
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        rank: int,
        size: int,
        zero_copy_min_bytes: int,
        wire_dtype: str = "",
    ) -> None:
        self._blocks = blocks = ShardBlocks(
            plan,
            group,
            size,
            aligned_bytes,
            _host_table,
            zero_copy_min_bytes,
            wire_dtype=wire_dtype,
        )
        self._own = blocks.table([rank])
        self._unpacked = blocks.table(blocks.unpacked_by(rank))

    def pack(self, gather: GatherRequest) -> None:
        """Copy this rank's shards of small tensors, and note where the large ones lie."""
        self._own.pack(gather.sources)
        owners = [gather.owners] * len(gather.sources)
        self._segments = self._blocks.segments(gather.sources, owners)

    def send(self, backend: Backend) -> Work[None]:
        """Gather it; called once after each :meth:`pack`."""
        segments, self._segments = self._segments, []
        return backend.all_gather(self._blocks.bytes, self._blocks.counts, segments)

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy what has arrived to the small tensors at these addresses."""
        self._unpacked.unpack(addresses)

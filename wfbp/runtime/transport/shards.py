"""Shards: how a tensor is shared out among the ranks, and the buffers that carry shards.

Rank r owns shard r of every decoupled tensor: equal runs of elements, rounded up to the width of a
vector load, so that the last ranks' shards may be short or empty. A buffer consists of one *block*
per rank, and block r holds shard r of each tensor of the group. Reduce-scatter leaves every rank
its block, whatever the groups of the all-gather are: the two partitions are independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wfbp import native
from wfbp.comm.backend import Backend, Buffer, Segment, Work
from wfbp.comm.device.device import SlotTable
from wfbp.core.plan import ALIGNMENT_BYTES, Plan
from wfbp.core.types import Op, TensorSpec, item_bytes
from wfbp.runtime.steps import GatherRequest, Step
from wfbp.runtime.transport.direct import BufferLayout, memory_at
from wfbp.runtime.transport.flags import FlagCodec, GroupFlags
from wfbp.runtime.transport.fusion import aligned_bytes, storage_dtype


def shard_bytes(spec: TensorSpec, size: int) -> int:
    """Bytes of the first and largest shard of a tensor, a multiple of the alignment.

    >>> shard_bytes(TensorSpec("w", (10,), "float32"), 2)
    32
    """
    equal = -(-spec.numel // size) * item_bytes(spec.dtype)
    return -(-equal // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def shard_range(spec: TensorSpec, rank: int, size: int) -> tuple[int, int]:
    """First byte of a rank's shard in its tensor, and the byte behind its last.

    >>> spec = TensorSpec("w", (10,), "float32")
    >>> [shard_range(spec, rank, 3) for rank in range(3)]
    [(0, 16), (16, 32), (32, 40)]
    """
    length = shard_bytes(spec, size)
    return min(rank * length, spec.nbytes), min((rank + 1) * length, spec.nbytes)


class _ShardBlocks:
    """The layout of a group's shards in one buffer, all ranks' blocks behind each other.

    Args:
        plan: what is sent.
        group: index of the group.
        size: number of ranks.
        zero_copy_min_bytes: tensors of at least this size are not packed.
        tail_bytes: to be left free at the end of each block.
    """

    def __init__(
        self, plan: Plan, group: int, size: int, zero_copy_min_bytes: int, tail_bytes: int = 0
    ) -> None:
        self.members = plan.groups[group].tensors
        self.dtype = plan.dtype(group)
        self._specs = [plan.tensors[k] for k in self.members]
        self._size = size
        places = [shard_bytes(spec, size) for spec in self._specs]
        buffer_layout = BufferLayout(
            places, [spec.nbytes for spec in self._specs], zero_copy_min_bytes
        )
        self._offsets, self._small = buffer_layout.offsets, buffer_layout.small
        ranges = [[shard_range(spec, r, size) for r in range(size)] for spec in self._specs]
        self._large = [
            (k, [stop - start for start, stop in ranges[k]]) for k in buffer_layout.large
        ]
        self.tail = -(-buffer_layout.end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.block_bytes = -(-(self.tail + tail_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.counts = [self.block_bytes] * size
        self.bytes = aligned_bytes(self.block_bytes * size)

    def block(self, rank: int) -> Buffer:
        """A rank's block."""
        return self.bytes[rank * self.block_bytes : (rank + 1) * self.block_bytes]

    def shard(self, position: int, rank: int) -> Buffer:
        """The bytes of a rank's shard of the group's tensor at ``position``."""
        start, stop = shard_range(self._specs[position], rank, self._size)
        offset = self._offsets[position]
        return self.block(rank)[offset : offset + stop - start]

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
                nbytes.append(stop - start)
                starts.append(start)
        small = [self.members[position] for position in self._small]
        table = native.PackTable(
            self.bytes,
            np.asarray(offsets, dtype=np.int64),
            np.asarray(nbytes, dtype=np.int64),
            self.dtype,
        )
        return ShardTable(table, small, starts, len(ranks))


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
        self._members = members
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
        own = np.asarray([addresses[k] for k in self._members], dtype=np.int64)
        bases = np.tile(own, self._times)
        self._table.pointers[:] = np.where(bases == 0, 0, bases + self._starts)


class ScatterBuffer:
    """Storage of one reduce-scattered group; the counterpart of ``FusionBuffer``.

    Args:
        plan: what to send.
        group: index of the group whose storage this is.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        rank: this rank.
        size: number of ranks.
        zero_copy_min_bytes: tensors of at least this size are not packed.
    """

    def __init__(
        self, plan: Plan, group: int, op: Op, rank: int, size: int, zero_copy_min_bytes: int
    ) -> None:
        self.num_moves = 0
        self._op = op
        self._rank = rank
        self._flags = FlagCodec(plan, group)
        self.dtype = plan.dtype(group)
        tail_bytes = self._flags.count * item_bytes(self.dtype)
        self._blocks = blocks = _ShardBlocks(plan, group, size, zero_copy_min_bytes, tail_bytes)
        self._table = blocks.table(range(size))
        end = blocks.tail + tail_bytes
        self._tails = [
            blocks.block(r)[blocks.tail : end].view(storage_dtype(self.dtype)) for r in range(size)
        ]

    def slot(self, position: int) -> Buffer:
        """The bytes of this rank's shard of the group's tensor at ``position``, as uint8."""
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
        return self._flags.read(self._tails[self._rank], step)


class GatherBuffer:
    """Storage of one all-gathered group.

    Args:
        plan: what to send.
        group: index of the group whose storage this is.
        rank: this rank.
        size: number of ranks.
        zero_copy_min_bytes: tensors of at least this size are not packed.
    """

    def __init__(
        self, plan: Plan, group: int, rank: int, size: int, zero_copy_min_bytes: int
    ) -> None:
        self._blocks = blocks = _ShardBlocks(plan, group, size, zero_copy_min_bytes)
        self._own = blocks.table([rank])
        self._others = blocks.table([r for r in range(size) if r != rank])

    def pack(self, gather: GatherRequest) -> None:
        """Copy this rank's shards of small tensors, and note where the large ones lie."""
        self._own.pack(gather.addresses)
        owners = [gather.owners] * len(gather.addresses)
        self._segments = self._blocks.segments(gather.addresses, owners)

    def send(self, backend: Backend) -> Work[None]:
        """Gather it; called once after each :meth:`pack`."""
        segments, self._segments = self._segments, []
        return backend.all_gather(self._blocks.bytes, self._blocks.counts, segments)

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy the other ranks' shards to the small tensors at these addresses."""
        self._others.unpack(addresses)

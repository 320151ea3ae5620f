"""Fusion buffers on a device: the counterparts of those in ``buffers``.

Packing is enqueued on the backend's packing stream, which does not wait for messages under way;
copying back, on the stream of the messages. All memory is the packing stream's. Every tensor is
packed, large ones too: on a device a copy costs little beside the message, and one launch serves
the whole group. Flags do not travel behind the tensors, but beside them (``flags``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from wfbp.comm.backend import Backend, Buffer, Work
from wfbp.comm.device.backend import DeviceBackend, DeviceWork
from wfbp.comm.device.device import Device, SlotTable
from wfbp.core.plan import Plan, aligned, layout
from wfbp.core.types import Op
from wfbp.runtime.step import GatherRequest, Step
from wfbp.runtime.transport.buffers import ShardBlocks, picker
from wfbp.runtime.transport.flags import GroupFlags, HostFlags


class _Storage:
    """Memory in which a group's tensors lie, and the table that copies them."""

    def __init__(
        self,
        backend: DeviceBackend,
        total: int,
        offsets: Sequence[int],
        nbytes: Sequence[int],
        dtype: str,
        tensor_dtype: str = "",
    ) -> None:
        device = backend.device
        self.bytes = device.zeros(total, backend.packing)
        address = device.address(self.bytes)
        self.addresses = tuple(address + start for start in offsets)
        self.slots = frozenset(
            start for start, size in zip(self.addresses, nbytes, strict=True) if size
        )
        self.table = _made_table(backend, self.bytes, offsets, nbytes, dtype, tensor_dtype)


class DeviceFusionBuffer:
    """Storage of one all-reduced group.

    A compressed one is cast to a message of its own, and back to the storage when it has arrived.

    Args:
        plan: what to send.
        group: index of the group.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        backend: sends it.
        flags: travel beside this group, if any do.
        deliveries: gets the tables that copy reduced tensors to their targets.
        wire_dtype: the type of the message, if not the group's.
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        op: Op,
        backend: DeviceBackend,
        flags: HostFlags | None,
        deliveries: list[SlotTable],
        wire_dtype: str = "",
    ) -> None:
        self._deliveries = deliveries
        self._op = op
        self._dtype = self._tensor_dtype = plan.dtype(group)
        self._beside = AttachedFlags(flags)
        members = plan.groups[group].tensors
        self._pick = picker(members)
        self._placed: tuple[int, ...] = ()
        self._nbytes = [plan.tensors[k].nbytes for k in members]
        self._offsets = plan.offsets(group)
        total = aligned(plan.nbytes(group))
        self._total = total
        self._backend = backend
        self.num_moves = 0
        self._message: _Storage | None = None
        if wire_dtype not in ("", self._dtype):
            specs = [plan.tensors[k] for k in members]
            wire_bytes = [spec.wire_bytes(wire_dtype) for spec in specs]
            offsets, end = layout(wire_bytes)
            end = aligned(end)
            self._message = _Storage(backend, end, offsets, wire_bytes, wire_dtype, self._dtype)
            self._dtype, self._tensor_dtype = wire_dtype, self._dtype
        self._storage = self._made()
        self._other: _Storage | None = None

    def _made(self) -> _Storage:
        dtype = self._tensor_dtype
        return _Storage(self._backend, self._total, self._offsets, self._nbytes, dtype)

    def slot(self, position: int) -> Buffer:
        """The bytes of the group's tensor at ``position``."""
        start = self._offsets[position]
        return self._storage.bytes[start : start + self._nbytes[position]]

    def pack(self, step: Step) -> None:
        """Copy the gradients, zeros for what is absent."""
        self._beside.step = step
        sources = self._pick(step.addresses)
        if sources != self._placed:
            self._make_room(sources)
            self._placed = sources
        table = self._sent.table
        table.point(self._placed)
        table.pack()

    def _make_room(self, sources: tuple[int, ...]) -> None:
        """Take other storage where gradients lie in this one, as in a ``FusionBuffer``."""
        if self._storage.slots.isdisjoint(sources):
            return
        other = self._other
        if other is None or not other.slots.isdisjoint(sources):
            other = self._made()
        self._other, self._storage = self._storage, other
        self.num_moves += 1

    @property
    def _sent(self) -> _Storage:
        """What travels."""
        return self._message or self._storage

    def unpack(self, addresses: Sequence[int]) -> None:
        """Have the tensors copied to these addresses, indexed by tensor; 0: not that one."""
        table = self._storage.table
        table.point(self._pick(addresses))
        self._deliveries.append(table)

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it."""
        self._backend.follow_packing()
        return self._beside.accompany(backend.all_reduce(self._sent.bytes, self._dtype, self._op))

    def arrived(self, step: int) -> GroupFlags:
        """What ranks said of the step, if that travelled beside this group."""
        if self._message is not None:
            self._message.table.point(self._storage.addresses)
            self._message.table.unpack()
        return self._beside.read(step)


class AttachedFlags:
    """The flags that travel beside a group, if any do."""

    def __init__(self, flags: HostFlags | None) -> None:
        self._flags = flags
        self.step: Step | None = None

    def accompany(self, work: Work[None]) -> Work[None]:
        """Send them with a group."""
        if self._flags is None:
            return work
        assert self.step is not None
        assert isinstance(work, DeviceWork)
        return _GroupAndFlags(work, self._flags.send(self.step))

    def read(self, number: int) -> GroupFlags:
        """What arrived."""
        return GroupFlags([], tensors=()) if self._flags is None else self._flags.read(number)


class _GroupAndFlags(DeviceWork):
    """A group on the device and the flags on the host."""

    def __init__(self, group: DeviceWork, flags: Work[None]) -> None:
        self._group = group
        self._flags = flags
        self.nbytes = group.nbytes

    @property
    def activity(self) -> int:
        return self._group.activity + self._flags.activity

    def issued(self) -> bool:
        return bool(self._group.issued() & self._flags.test())

    def test(self) -> bool:
        return bool(self._group.test() & self._flags.test())

    def then(self, target: Buffer, source: Buffer) -> None:
        self._group.then(target, source)


def _made_table(
    backend: DeviceBackend,
    buffer: Buffer,
    offsets: Sequence[int],
    nbytes: Sequence[int],
    dtype: str,
    tensor_dtype: str,
) -> _Table:
    """A table that packs before messages and unpacks behind them."""
    device = backend.device
    table = device.pack_table(
        buffer, offsets, nbytes, dtype, backend.packing, tensor_dtype, backend.stream
    )
    return _Table(device, table)


def _shard_blocks(
    plan: Plan, group: int, backend: DeviceBackend, wire_dtype: str = ""
) -> ShardBlocks:
    return ShardBlocks(
        plan,
        group,
        backend.size,
        lambda nbytes: backend.device.zeros(nbytes, backend.packing),
        partial(_made_table, backend),
        wire_dtype=wire_dtype,
    )


class _Table:
    """A table whose launches a profiler shows by name, and whose addresses seldom change."""

    def __init__(self, device: Device, table: SlotTable) -> None:
        self._device = device
        self._table = table
        self._pointed: tuple[int, ...] | None = None

    def point(self, addresses: tuple[int, ...]) -> None:
        """Write the addresses. To compare takes a third of the time that writing them does, and
        allocators mostly give a step's gradients the memory of those of the step before."""
        if addresses is not self._pointed and addresses != self._pointed:
            self._table.pointers[:] = np.fromiter(addresses, np.int64, len(addresses))
            self._pointed = addresses

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """Addresses, written before each launch; 0: absent."""
        return self._table.pointers

    def pack(self) -> None:
        """Fill the buffer."""
        with self._device.annotate("wfbp pack"):
            self._table.pack()

    def unpack(self) -> None:
        """Copy from the buffer."""
        with self._device.annotate("wfbp unpack"):
            self._table.unpack()


class DeviceScatterBuffer:
    """Storage of one reduce-scattered group; arguments as for :class:`DeviceFusionBuffer`."""

    def __init__(
        self,
        plan: Plan,
        group: int,
        op: Op,
        backend: DeviceBackend,
        flags: HostFlags | None,
        deliveries: list[SlotTable],
        wire_dtype: str = "",
    ) -> None:
        self.num_moves = 0
        self._op = op
        self._rank = backend.rank
        self._beside = AttachedFlags(flags)
        self._backend = backend
        self._blocks = blocks = _shard_blocks(plan, group, backend, wire_dtype)
        self._table = blocks.table(range(backend.size))
        self._results: list[Buffer] = []
        if blocks.casts:
            rank, device = backend.rank, backend.device
            offsets, nbytes, end = blocks.result_layout(rank)
            memory = device.zeros(aligned(end), backend.packing)
            self._results = [
                memory[offset : offset + size] for offset, size in zip(offsets, nbytes, strict=True)
            ]
            self._own = blocks.table([rank])
            addresses = [device.address(memory) + offset for offset in offsets]
            self._targets = blocks.whole_tensors(len(plan.tensors), rank, addresses)

    def slot(self, position: int) -> Buffer:
        """The bytes of this rank's shard of the group's tensor at ``position``."""
        if self._results:
            return self._results[position]
        return self._blocks.shard(position, self._rank)

    def pack(self, step: Step) -> None:
        """Copy the gradients, zeros for what is absent."""
        self._beside.step = step
        self._table.pack(step.addresses)

    def unpack(self, addresses: Sequence[int]) -> None:
        """Shards stay where they are."""

    def send(self, backend: Backend) -> Work[None]:
        """Reduce it, each rank its block."""
        blocks = self._blocks
        self._backend.follow_packing()
        work = backend.reduce_scatter(blocks.bytes, blocks.counts, blocks.dtype, self._op)
        return self._beside.accompany(work)

    def arrived(self, step: int) -> GroupFlags:
        """What ranks said of the step, if that travelled beside this group."""
        if self._results:
            self._own.unpack(self._targets)
        return self._beside.read(step)


class DeviceGatherBuffer:
    """Storage of one all-gathered group; arguments as for ``GatherBuffer``."""

    def __init__(
        self, plan: Plan, group: int, backend: DeviceBackend, wire_dtype: str = ""
    ) -> None:
        rank = backend.rank
        self._backend = backend
        self._blocks = blocks = _shard_blocks(plan, group, backend, wire_dtype)
        self._own = blocks.table([rank])
        self._unpacked = blocks.table(blocks.unpacked_by(rank))

    def pack(self, gather: GatherRequest) -> None:
        """Copy this rank's shards."""
        self._own.pack(gather.sources)

    def send(self, backend: Backend) -> Work[None]:
        """Gather it."""
        self._backend.follow_packing()
        return backend.all_gather(self._blocks.bytes, self._blocks.counts)

    def unpack(self, addresses: Sequence[int]) -> None:
        """Copy what has arrived to the tensors at these addresses."""
        self._unpacked.unpack(addresses)

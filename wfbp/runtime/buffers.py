"""Group buffers: memory for the message of each group, and for its results.

Small tensors are copied into one message; large ones are sent from their own memory, because
copying costs more than another message. Large tensors come first in a message, so that the small
ones and the flags after them stay contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import and_, itemgetter

import numpy as np

from wfbp.comm.arrays import Buffer, MemoryAt, Segment, storage_dtype
from wfbp.comm.backend import Work
from wfbp.comm.memory import Memory, SlotTable
from wfbp.core.plan import Plan, aligned, layout
from wfbp.core.types import CODEC_BLOCK, Op, Operation, TensorSpec, item_bytes, wire_type
from wfbp.runtime.step import BufferView, Gather, Lent, Step, StepResult

_STEP_BITS, _CALL_BITS, _MARK_BITS = 6, 6, 4
STEP_CYCLE = 1 << _STEP_BITS
"""Messages carry step numbers modulo this."""
NUM_MARKS = 1 << _MARK_BITS
"""Marks of parameters are below this."""

NUM_STEP_FLAGS = 3 + 2 * (_STEP_BITS + _CALL_BITS + _MARK_BITS)
"""Beside one flag per tensor: a request, a wish for whole gradients, a discard, the step's number,
the call that closes it, a mark of the parameters."""


class GroupBuffer:
    """The message of one group of a plan, and its reduced tensors. Used under the progress lock.

    An all-reduce has one block of whole tensors; the other operations have a block of shards per
    rank. The training thread may read results until the next step's first gradient. Results never
    overwrite what the program still uses: an earlier result that it has kept, or a gradient of this
    rank, which may grow and be sent again (:meth:`_make_way`).
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        members: Sequence[int],
        op: Op,
        memory: Memory,
        wire_dtype: str = "",
        positions: Sequence[int] | None = None,
    ) -> None:
        """The message of these ``positions`` of the group, by default all."""
        this = plan.groups[group]
        tensors = this.tensors if positions is None else [this.tensors[p] for p in positions]
        self._memory = memory
        self._op = op
        self._is_gather = this.operation is Operation.ALL_GATHER
        # Whether results are whole tensors; else they are this rank's shards.
        self.whole = this.operation is Operation.ALL_REDUCE
        backend = memory.backend
        size, self._own = (1, 0) if self.whole else (backend.size, backend.rank)
        self._tensor_dtype = plan.dtype(group)
        self.dtype = wire_type(self._tensor_dtype, wire_dtype)
        self._casts = self.dtype != self._tensor_dtype  # results are then cast back
        self._members = [members[k] for k in tensors]
        self._pick = picker(self._members)
        self._segments: list[Segment] = []
        self._delivered: set[int] = set()
        self.num_moves = 0
        self.dropped: set[int] = set()  # addresses of results that are the program's alone now
        self._lay_out([plan.tensors[k] for k in tensors], size)
        # The last group of backward carries the step's flags, so no step needs to negotiate.
        self._flagged = list(members) if group == plan.num_backward - 1 else []
        num_flags = len(members) + NUM_STEP_FLAGS if self._flagged else 0
        in_message = 0 if memory.sends_flags_separately else num_flags
        self._separate_flags = np.zeros(num_flags - in_message, np.uint8)
        self._block_bytes = aligned(self._tail + in_message * item_bytes(self.dtype))
        self._counts = [self._block_bytes] * size
        self.nbytes = self._block_bytes * size
        self._tail_end = self._tail + in_message * item_bytes(self.dtype)
        self._message = self._results = self._new_message()
        if self._casts:
            self._results = self._new_results()
        self._other: Storage | None = None

    def _lay_out(self, specs: Sequence[TensorSpec], size: int) -> None:
        """Decide the tensors' offsets in a block, and which of them are not packed."""
        self._ranges = [[shard_range(spec, rank, size) for spec in specs] for rank in range(size)]
        self._own_bytes = [stop - start for start, stop in self._ranges[self._own]]  # of results
        self._nbytes = [spec.nbytes for spec in specs]
        limit = self._memory.zero_copy_min_bytes
        if self._casts or limit is None:
            limit = max(self._nbytes, default=0) + 1
        large = [p for p, nbytes in enumerate(self._nbytes) if nbytes >= limit]
        small = [p for p, nbytes in enumerate(self._nbytes) if nbytes < limit]
        starts, end = layout([self._wire_bytes(shard_bytes(specs[p], size)) for p in large + small])
        place_of = dict(zip(large + small, starts, strict=True))
        self._offsets = [place_of[p] for p in range(len(specs))]
        # By position of a large tensor, the bytes of each rank's part.
        self._large = {
            p: [stop - start for start, stop in (r[p] for r in self._ranges)] for p in large
        }
        # Large tensors can also be packed into one block. In several blocks their pieces are not
        # adjacent, so segments send them.
        self._packed = list(range(len(specs))) if self.whole else small
        self._pick_packed = picker([self._members[p] for p in self._packed])
        self._tail = aligned(end)

    def _wire_bytes(self, nbytes: int) -> int:
        """Bytes in the message for so many bytes of a tensor."""
        return nbytes // item_bytes(self._tensor_dtype) * item_bytes(self.dtype)

    def _new_message(self) -> Storage:
        prefers = self.whole or self._memory.backend.on_two_levels
        data = self._memory.zeros(self.nbytes, travels=prefers)
        offsets = [self._own * self._block_bytes + offset for offset in self._offsets]
        message = Storage(self._memory, data, offsets, self._own_bytes)
        message.copies_segments = self.whole and self._memory.backend.copies_segments(data)
        every, own = range(len(self._counts)), [self._own]
        message.packing = self._table(data, own if self._is_gather else every)
        if self._is_gather:
            message.unpacking = self._table(data, [rank for rank in every if rank != self._own])
        elif self.whole or self._casts:
            message.unpacking = self._table(data, own)
        if self._tail_end > self._tail:
            blocks = [data[rank * self._block_bytes :] for rank in every]
            elements = storage_dtype(self.dtype)
            message.tails = [block[self._tail : self._tail_end].view(elements) for block in blocks]
        return message

    def _new_results(self) -> Storage:
        offsets, end = layout(self._own_bytes)
        return Storage(self._memory, self._memory.zeros(aligned(end)), offsets, self._own_bytes)

    def _table(self, data: Buffer, ranks: Sequence[int]) -> _PieceTable:
        """A table of the packed tensors' pieces in some blocks."""
        offsets, nbytes, starts = [], [], []
        for rank in ranks:
            for position in self._packed:
                start, stop = self._ranges[rank][position]
                offsets.append(rank * self._block_bytes + self._offsets[position])
                nbytes.append(self._wire_bytes(stop - start))
                starts.append(start)
        table = self._memory.slot_table(data, offsets, nbytes, self.dtype, self._tensor_dtype)
        return _PieceTable(table, starts, len(ranks))

    def result(self, position: int) -> Buffer:
        """Bytes of the reduced tensor at ``position`` in the group, or of this rank's shard."""
        results = self._results
        start, stop = self._ranges[self._own][position]
        offset = results.offsets[position]
        return results.data[offset : offset + stop - start]

    def view(self, position: int) -> BufferView:
        """The same with its address, for the training thread."""
        results = self._results
        address, lent = results.addresses[position], results.lent[position]
        return BufferView(self.result(position), address, self.whole, lent)

    def pack(self, step: Step | Gather) -> None:
        """Copy the tensors at ``step.sources`` into the message; zeros for absent ones."""
        sources = self._pick(step.sources)
        if self._results.is_used(sources):
            self._make_way(sources)
        message = self._message
        if self._large:
            sources = self._note_large(step, list(sources))
        message.packing.point(sources if self.whole else self._pick_packed(step.sources))
        message.packing.table.pack()
        if not self._flagged:
            return
        assert isinstance(step, Step)
        flags = [1 if step.sources[k] else 0 for k in self._flagged]
        flags += [step.requested, step.whole, step.discards]
        flags += step_flags(step.number % STEP_CYCLE, step.closing_call, step.mark)
        if self._separate_flags.size:
            self._separate_flags[:] = flags
            return
        values = np.array(flags, np.uint16)
        if self.dtype == "bfloat16":
            values *= _ONE_AS_BFLOAT16
        for tail in self._message.tails:
            tail[:] = values

    def _make_way(self, sources: Sequence[int]) -> None:
        """Move results to storage that the program does not use, without any of these gradients."""
        other = self._other
        if other is None or other.is_used(sources):
            # What the program uses keeps the other storage alive.
            if other is not None:
                self.dropped |= other.slots
            other = self._new_results() if self._casts else self._new_message()
        self._other, self._results = self._results, other
        if not self._casts:
            self._message = other
        self.num_moves += 1

    def _note_large(self, step: Step | Gather, sources: list[int]) -> tuple[int, ...]:
        """Have large tensors sent from their own memory; returns the addresses to pack from."""
        message = self._message
        self._segments = []
        self._delivered.clear()
        for position, counts in self._large.items():
            k, nbytes = self._members[position], self._nbytes[position]
            offset = self._offsets[position]
            if not self.whole:
                data = memory_at(sources[position], nbytes, step.owners[k])
                self._segments.append(Segment(offset, data, counts))
                continue
            assert isinstance(step, Step)
            owner, result = step.owners[k], None
            # Memory without an owner may be freed if a step fails, so it is copied, unless the
            # backend would not read it afterwards.
            if sources[position] and (message.copies_segments or owner is not None):
                data = memory_at(sources[position], nbytes, owner)
                sources[position] = message.addresses[position]  # nothing is copied
            else:
                data = self.result(position)
            if message.copies_segments and step.targets and step.targets[k]:
                result = memory_at(step.targets[k], nbytes, None)
                self._delivered.add(k)
            self._segments.append(Segment(offset, data, (), result))
        return tuple(sources)

    def send(self) -> Work[None]:
        """Send it; called once after each :meth:`pack` and ``Memory.end_packing``."""
        memory, data = self._memory, self._message.data
        segments, self._segments = self._segments, []
        work: Work[None]
        if self.whole:
            work = memory.backend.all_reduce(data, self.dtype, self._op, segments)
        elif self._is_gather:
            work = memory.backend.all_gather(data, self._counts, segments)
        else:
            work = memory.backend.reduce_scatter(data, self._counts, self.dtype, self._op, segments)
        return memory.with_flags(work, self._separate_flags) if self._separate_flags.size else work

    def arrived(self) -> None:
        """Cast results back, if they were cast."""
        if self._casts:
            message = self._message
            message.unpacking.point_at(self._results.addresses)
            message.unpacking.table.unpack()

    def deliver(self, step: Step | Gather) -> None:
        """Copy whole tensors to ``step.targets``; on a device, when the training thread joins."""
        if self._is_gather:
            self._message.unpacking.point(self._pick_packed(step.sources))
            self._message.unpacking.table.unpack()
        elif isinstance(step, Step) and self.whole and step.targets:
            targets = self._pick(step.targets)
            if self._delivered:  # these are there already
                members = zip(self._members, targets, strict=True)
                targets = tuple(0 if k in self._delivered else target for k, target in members)
            self._message.unpacking.point(targets)
            self._memory.deliver(self._message.unpacking.table)

    def read_flags(self, step: Step) -> StepResult:
        """All ranks' flags of the step, for a rank that is at this step."""
        reduced = self._separate_flags
        if not reduced.size:
            reduced = self._message.tails[self._own if len(self._message.tails) > 1 else 0]
        # Also if they were divided, and as bits of bfloat16: more than 0 is yes.
        flags: list[bool] = (reduced > 0).tolist()
        requested, whole, discarded, *steps = flags[len(self._flagged) :]
        differ = list(map(and_, steps[::2], steps[1::2]))  # bits that only some ranks have set
        in_cycle = steps[: 2 * _STEP_BITS : 2]
        agree = in_cycle == [bool(step.number >> k & 1) for k in range(_STEP_BITS)]
        return StepResult(
            present=flags[: len(self._flagged)],
            requested=requested,
            discarded=discarded,
            whole=whole,
            steps_agree=agree and not any(differ[: _STEP_BITS + _CALL_BITS]),
            marks_agree=not any(differ[_STEP_BITS + _CALL_BITS :]),
        )


_ONE_AS_BFLOAT16 = 0x3F80


class Storage:
    """Memory of a message or its results: ``addresses`` of results, ``slots`` of nonempty ones."""

    def __init__(
        self, memory: Memory, data: Buffer, offsets: Sequence[int], nbytes: Sequence[int]
    ) -> None:
        self.data = data
        self.offsets = offsets
        address = memory.address(data)
        self.addresses = [address + offset for offset in offsets]
        self.slots = frozenset(p for p, n in zip(self.addresses, nbytes, strict=True) if n)
        self.lent: list[list[Lent]] = [[] for _ in offsets]
        self.copies_segments = False
        self.packing: _PieceTable
        self.unpacking: _PieceTable
        self.tails: list[Buffer] = []

    def is_used(self, sources: Sequence[int]) -> bool:
        """Whether the program uses it, or one of these gradients is in it."""
        if not self.slots.isdisjoint(sources):
            return True
        return any(lent.is_used() for (lent,) in filter(None, self.lent))


class _PieceTable:
    """Copies pieces of tensors to or from blocks; ``starts`` are offsets within tensors."""

    def __init__(self, table: SlotTable, starts: Sequence[int], times: int) -> None:
        self.table = table
        self._starts = np.asarray(starts, np.int64)
        self._times = times
        self._pointed: tuple[int, ...] = ()

    def point(self, tensors: tuple[int, ...]) -> None:
        """Set the tensors' addresses; 0 stands for zeros, or for nowhere."""
        # Most steps repeat the addresses, and comparing takes a third of the time of writing.
        if tensors != self._pointed:
            self._pointed = tensors
            addresses = np.array(tensors * self._times, np.int64)
            self.table.pointers[:] = np.where(addresses == 0, 0, addresses + self._starts)

    def point_at(self, pieces: Sequence[int]) -> None:
        """Copy from or to pieces at these addresses."""
        self._pointed = ()
        self.table.pointers[:] = pieces


def memory_at(address: int, nbytes: int, owner: object) -> Buffer:
    """The bytes at an address, which keep their owner alive; zeros for address 0."""
    return np.asarray(MemoryAt(address, nbytes, owner)) if address else np.zeros(nbytes, np.uint8)


def picker(indices: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return a function that gives a tuple of the values at these indices."""
    if len(indices) == 1:  # itemgetter() of one index returns no tuple
        (index,) = indices
        return lambda values: (values[index],)
    return itemgetter(*indices) if indices else lambda values: ()


@lru_cache(2 * STEP_CYCLE * NUM_MARKS)
def step_flags(number: int, call: int | None, mark: int | None) -> tuple[bool, ...]:
    """Per bit of each, whether it is set, and whether it is not: so a sum shows that ranks differ.
    Of a number that is None, all flags are False, which agrees with any."""
    flags: list[bool] = []
    for value, bits in ((number, _STEP_BITS), (call, _CALL_BITS), (mark, _MARK_BITS)):
        for k in range(bits):
            is_set = value is not None and bool(value >> k & 1)
            flags += is_set, value is not None and not is_set
    return tuple(flags)


def shard_bytes(spec: TensorSpec, size: int) -> int:
    """Bytes of the first and largest shard of a tensor: whole blocks if it can be encoded, whole
    vectors otherwise."""
    equal = -(-spec.numel // size) * spec.item_bytes
    if spec.encodable(size):
        block = CODEC_BLOCK * spec.item_bytes
        return -(-equal // block) * block
    return aligned(equal)


def shard_range(spec: TensorSpec, rank: int, size: int) -> tuple[int, int]:
    """Start and stop byte of a rank's shard within its tensor."""
    length = shard_bytes(spec, size)
    return min(rank * length, spec.nbytes), min((rank + 1) * length, spec.nbytes)

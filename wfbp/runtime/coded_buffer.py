"""Messages of encoded gradients, and of groups with encoded and exact ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from wfbp.comm.arrays import Buffer, Segment, zeroed
from wfbp.comm.backend import Work
from wfbp.comm.memory import Memory
from wfbp.core.plan import Plan, layout
from wfbp.core.types import CODECS, Op, Operation, TensorSpec
from wfbp.native import Coding
from wfbp.runtime.buffers import (
    GroupBuffer,
    Storage,
    memory_at,
    picker,
    shard_bytes,
    shard_range,
)
from wfbp.runtime.step import BufferView, Gather, Step, StepResult

_ITEM = 4


class ErrorFeedback:
    """The rounding errors of encoding, which are added to the next step's gradients.

    Kept by tensor, so that they outlive plans: the errors of what this rank sends, and of the sums
    that it owns. A block without gradient keeps its error. An average that the program does
    not use leaves no error, or a part of its gradient would arrive in the next step.
    """

    def __init__(self, specs: Sequence[TensorSpec], rank: int, size: int) -> None:
        self._specs, self._rank, self._size = specs, rank, size
        self._errors: dict[int, tuple[Buffer, Buffer]] = {}

    def of(self, index: int) -> tuple[Buffer, Buffer]:
        """Errors of a tensor's gradient, and of this rank's shard of the sum (float32)."""
        if index not in self._errors:
            spec = self._specs[index]
            start, stop = shard_range(spec, self._rank, self._size)
            errors = [zeroed(n).view(np.float32) for n in (spec.nbytes, stop - start)]
            self._errors[index] = errors[0], errors[1]
        return self._errors[index]

    def forget(self) -> None:
        """Begin anew, with buffers that are made after this."""
        self._errors.clear()

    def scale(self, indices: Iterable[int] | None, scale: float) -> None:
        """Multiply the errors of some tensors, or of all, as their averages were; 0 drops them."""
        for index in list(self._errors) if indices is None else indices:
            for error in self._errors.get(index, ()):
                if scale:
                    error *= np.float32(scale)
                else:  # also what is not finite
                    error.fill(0.0)


class CodedBuffer:
    """The encoded tensors of one group of backward; used as a :class:`GroupBuffer` is.

    Gradients are encoded from where they are. The buffer has a block of shards per rank, and each
    shard starts with a block of the codec. So no plan changes blocks, or the bits of results. Of
    the buffer only shards of results are used, unless ranks of a host are added first.
    """

    def __init__(
        self,
        plan: Plan,
        group: int,
        positions: Sequence[int],
        members: Sequence[int],
        op: Op,
        memory: Memory,
        codec: str,
        errors: ErrorFeedback,
    ) -> None:
        this, backend = plan.groups[group], memory.backend
        specs = [plan.tensors[this.tensors[p]] for p in positions]
        size, self._own = backend.size, backend.rank
        self._memory, self._op = memory, op
        self.whole = this.operation is Operation.ALL_REDUCE
        self.nbytes = sum(spec.wire_bytes(codec) for spec in specs)
        self.num_moves = 0
        self.dropped: set[int] = set()
        self._members = [members[this.tensors[p]] for p in positions]
        self._pick = picker(self._members)
        self._nbytes = [spec.nbytes for spec in specs]
        self._offsets, block_bytes = layout([shard_bytes(spec, size) for spec in specs])
        self._counts = [block_bytes] * size
        ranges = [[shard_range(spec, rank, size) for rank in range(size)] for spec in specs]
        self._parts = [[stop - start for start, stop in shards] for shards in ranges]
        self._results_at = layout(self._nbytes)
        parts = []
        for rank in range(size):
            for offset, shards, member in zip(self._offsets, ranges, self._members, strict=True):
                start, stop = (at // _ITEM for at in shards[rank])
                if start == stop:
                    continue
                error, sum_error = errors.of(member)
                first = (rank * block_bytes + offset) // _ITEM
                is_own = rank == self._own
                feedback = (None, sum_error) if is_own else (error[start:stop], None)
                parts.append((first, stop - start, *feedback))
        self._coding = Coding(codec, parts)
        self._segments: list[Segment] = []
        self._data = self._new_data()
        self._storage = self._new_storage(self._data)
        self._other: Storage | None = None

    def _new_data(self) -> Buffer:
        on_two_levels = self._memory.backend.on_two_levels
        return self._memory.zeros(sum(self._counts), travels=on_two_levels)

    def _new_storage(self, data: Buffer) -> Storage:
        """Memory for results; of shards, within the data."""
        memory = self._memory
        if not self.whole:
            block = self._own * self._counts[0]
            own = [parts[self._own] for parts in self._parts]
            return Storage(memory, data, [block + at for at in self._offsets], own)
        offsets, nbytes = self._results_at
        return Storage(memory, memory.zeros(nbytes), offsets, self._nbytes)

    def result(self, position: int) -> Buffer:
        """Bytes of the reduced tensor, or of this rank's shard."""
        offset = self._storage.offsets[position]
        parts = self._parts[position]
        nbytes = self._nbytes[position] if self.whole else parts[self._own]
        return self._storage.data[offset : offset + nbytes]

    def view(self, position: int) -> BufferView:
        """The same with its address, for the training thread."""
        storage = self._storage
        address, lent = storage.addresses[position], storage.lent[position]
        return BufferView(self.result(position), address, self.whole, lent)

    def pack(self, step: Step | Gather) -> None:
        """Note where the gradients are."""
        sources = self._pick(step.sources)
        if self._storage.is_used(sources):
            self._make_way(sources)
        each = zip(self._members, sources, self._offsets, self._nbytes, self._parts, strict=True)
        self._segments = []
        for k, source, offset, nbytes, parts in each:
            data = memory_at(source, nbytes, step.owners[k])
            if source and step.owners[k] is None:  # may be freed if the step fails
                data = data.copy()
            self._segments.append(Segment(offset, data, parts))

    def _make_way(self, sources: Sequence[int]) -> None:
        """Move results to storage that the program does not use, as a ``GroupBuffer`` does."""
        other = self._other
        if other is None or other.is_used(sources):
            if other is not None:
                self.dropped |= other.slots
            other = self._new_storage(self._data if self.whole else self._new_data())
        if not self.whole:
            self._data = other.data
        self._other, self._storage = self._storage, other
        self.num_moves += 1

    def send(self) -> Work[None]:
        segments, self._segments = self._segments, []
        results = None
        if self.whole:
            each = zip(self._offsets, self._parts, strict=True)
            results = [
                Segment(offset, self.result(position), parts)
                for position, (offset, parts) in enumerate(each)
            ]
        backend = self._memory.backend
        return backend.reduce_encoded(
            self._data, self._counts, self._op, segments, self._coding, results
        )

    def arrived(self) -> None:
        """Nothing to do: the exchange has decoded the results in place."""

    def deliver(self, step: Step | Gather) -> None:
        """Copy whole tensors to ``step.targets``."""
        if not (isinstance(step, Step) and self.whole and step.targets):
            return
        for position, target in enumerate(self._pick(step.targets)):
            if target:
                result = self.result(position)
                memory_at(target, result.nbytes, None)[:] = result


class MixedBuffer:
    """The messages of one group, some of whose tensors are sent in another form than the others;
    used as a :class:`GroupBuffer` is. ``parts`` are buffers and the positions of their tensors."""

    def __init__(self, parts: Sequence[tuple[GroupBuffer | CodedBuffer, Sequence[int]]]) -> None:
        self._buffers = [buffer for buffer, _ in parts]
        self._place = {
            position: (buffer, number)
            for buffer, positions in parts
            for number, position in enumerate(positions)
        }
        self.whole = self._buffers[0].whole
        self.nbytes = sum(buffer.nbytes for buffer in self._buffers)
        self.dropped: set[int] = set()
        for buffer in self._buffers:
            buffer.dropped = self.dropped

    @property
    def num_moves(self) -> int:
        return sum(buffer.num_moves for buffer in self._buffers)

    def result(self, position: int) -> Buffer:
        buffer, number = self._place[position]
        return buffer.result(number)

    def view(self, position: int) -> BufferView:
        buffer, number = self._place[position]
        return buffer.view(number)

    def pack(self, step: Step | Gather) -> None:
        for buffer in self._buffers:
            buffer.pack(step)

    def send(self) -> Work[None]:
        return _AllOf([buffer.send() for buffer in self._buffers], self.nbytes)

    def arrived(self) -> None:
        for buffer in self._buffers:
            buffer.arrived()

    def deliver(self, step: Step | Gather) -> None:
        for buffer in self._buffers:
            buffer.deliver(step)

    def read_flags(self, step: Step) -> StepResult:
        exact = self._buffers[-1]
        assert isinstance(exact, GroupBuffer)
        return exact.read_flags(step)


class _AllOf(Work[None]):
    """Several works of one backend."""

    def __init__(self, works: Sequence[Work[None]], nbytes: int) -> None:
        self._works, self.nbytes = works, nbytes
        self.place = works[-1].place

    def test(self) -> bool:
        return all(work.test() for work in self._works)

    @property
    def activity(self) -> int:
        return self._works[0].activity

    @property
    def moved_s(self) -> float:
        return max(work.moved_s for work in self._works)


def make_buffer(
    plan: Plan,
    group: int,
    members: Sequence[int],
    op: Op,
    memory: Memory,
    wires: Sequence[str],
    errors: ErrorFeedback,
) -> GroupBuffer | MixedBuffer:
    """The buffer of a group, whose tensors are sent as ``wires`` say. The step's flags are with
    what is sent exactly, in the last message."""
    positions: dict[str, list[int]] = {}
    for position, wire in enumerate(wires):
        positions.setdefault(wire, []).append(position)
    if len(positions) == 1 and wires[0] not in CODECS:
        return GroupBuffer(plan, group, members, op, memory, wires[0])
    if group == plan.num_backward - 1 and all(wire in CODECS for wire in positions):
        positions[""] = []
    parts: list[tuple[GroupBuffer | CodedBuffer, Sequence[int]]] = []
    for wire, chosen in sorted(positions.items(), key=lambda item: item[0] not in CODECS):
        if wire in CODECS:
            coded = CodedBuffer(plan, group, chosen, members, op, memory, wire, errors)
            parts.append((coded, chosen))
        else:
            parts.append((GroupBuffer(plan, group, members, op, memory, wire, chosen), chosen))
    return MixedBuffer(parts)

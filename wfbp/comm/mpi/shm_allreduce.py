"""All-reduce among ranks that can read each other's memory (``shm_memory``).

A rank publishes the offset of its contribution (READY), combines its shard in place from all ranks'
memory (REDUCED) and copies the other shards (TAKEN). It must not change its memory until every rank
has reached TAKEN. Flags order the data only if processors see stores in order
(``shm_memory.ORDERED``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wfbp.comm.arrays import Buffer, combine, split, typed
from wfbp.comm.backend import Segment
from wfbp.comm.mpi.shm_memory import HEADER_BYTES, NUM_FLAG_SETS, SharedMemory
from wfbp.comm.mpi.transfers import ProgressGroup, Task, chunks
from wfbp.core.types import Op

WAITING, READY, REDUCED, TAKEN = range(4)
"""Phases of a task; one that is WAITING for a row of flags has published nothing."""
_PHASES = 4
_ROW_WORDS = 8
"""A cache line."""
_FLAG_SET_BYTES = HEADER_BYTES // (NUM_FLAG_SETS + 1)
"""The first set's bytes of the header are reserved for ``SharedMemory``."""
_NUM_ROWS = _FLAG_SET_BYTES // (_ROW_WORDS * 8)
"""More than the tasks that a channel usually has under way; others wait for a row."""


class SharedFlags:
    """Flags that publish each rank's progress with the tasks of one channel.

    ``places`` are each rank's number in the memory, and its set of flags there. A task has one row
    per rank, written by that rank alone: a growing number that encodes task and phase, the offset
    of its contribution, and a note that ranks may compare. Task numbers agree on all ranks.
    A row is reused only when no rank needs it: a later task in the row implies that the earlier one
    is over.
    """

    def __init__(self, memory: SharedMemory, rank: int, places: Sequence[tuple[int, int]]) -> None:
        self.rank = rank
        self.peers = [(rank + step) % len(places) for step in range(1, len(places))]
        # Items of memoryviews are read in half the time of those of arrays.
        starts = [(at, (number + 1) * _FLAG_SET_BYTES) for at, number in places]
        self._words = memory.views(starts, _FLAG_SET_BYTES)
        self._words[:] = [memoryview(view.view(np.int64)) for view in self._words]  # type: ignore
        self._num_tasks = 0

    def next_task(self) -> int:
        """A number for a task."""
        self._num_tasks += 1
        return self._num_tasks

    @property
    def position(self) -> int:
        """How many tasks have been numbered."""
        return self._num_tasks

    def begin(self, task: int, offset: int, note: int = 0) -> bool:
        """Publish the offset of this rank's contribution; False, publishing nothing, if a rank may
        still need the row for the previous task in it."""
        before = task - _NUM_ROWS
        if before > 0 and not all(self.reached(r, before, TAKEN) for r in range(len(self._words))):
            return False
        words, row = self._words[self.rank], task % _NUM_ROWS * _ROW_WORDS
        words[row + 1] = offset
        words[row + 2] = note
        words[row] = task * _PHASES + READY  # last: a rank that sees it reads the offset
        return True

    def tell(self, task: int, phase: int) -> None:
        """Publish that this rank has reached a phase of a task."""
        self._words[self.rank][task % _NUM_ROWS * _ROW_WORDS] = task * _PHASES + phase

    def reached(self, rank: int, task: int, phase: int) -> bool:
        """Whether a rank has reached a phase of a task."""
        reached: int = self._words[rank][task % _NUM_ROWS * _ROW_WORDS]
        return reached >= task * _PHASES + phase

    def note(self, rank: int, task: int) -> int:
        """The note of a rank; valid once it is READY."""
        note: int = self._words[rank][task % _NUM_ROWS * _ROW_WORDS + 2]
        return note

    def offset(self, rank: int, task: int) -> int:
        """The offset of a rank's contribution; valid once it is READY."""
        offset: int = self._words[rank][task % _NUM_ROWS * _ROW_WORDS + 1]
        return offset


class Part(NamedTuple):
    """Elements of a chunk in separate memory; ``result`` None: the chunk receives the result."""

    start: int
    data: Buffer
    result: Buffer | None


class SharedReduceTask(Task):
    """All-reduce of one chunk in place; ``parts`` are in separate memory, ascending."""

    def __init__(
        self,
        memory: SharedMemory,
        flags: SharedFlags,
        group: ProgressGroup,
        chunk: Buffer,
        parts: Sequence[Part],
        dtype: str,
        op: Op,
    ) -> None:
        self.nbytes = chunk.nbytes
        self._memory = memory
        self._flags = flags
        self._group = group
        self._chunk = chunk
        self._parts = parts
        self._dtype = dtype
        self._op = op
        self._rank = flags.rank
        self._number = flags.next_task()
        self._shards = split(chunk.size, len(flags.peers) + 1)
        self._phase = WAITING
        self._missing = flags.peers
        """Ranks that have not reached the next phase (REDUCED: whose shard is not copied yet)."""

    def start(self) -> None:
        memory, chunk = self._memory, self._chunk
        offset = memory.offset(chunk)
        for start, data, _ in self._parts:
            if memory.offset(data) != offset + start * chunk.itemsize:
                chunk[start : start + data.size] = data
        if self._flags.begin(self._number, offset):
            self._phase = READY

    def step(self) -> bool:
        flags, number = self._flags, self._number
        if self._phase == WAITING:
            if not flags.begin(number, self._memory.offset(self._chunk)):
                return False
            self._phase = READY
        if self._phase == READY:
            if not all(flags.reached(peer, number, READY) for peer in flags.peers):
                return False
            shards = [self._shard(rank, self._rank) for rank in range(len(self._shards))]
            combine(shards, shards[self._rank], self._dtype, self._op)
            self._enter(REDUCED)  # before the copies: the other ranks can take the shard meanwhile
            self._deliver(self._rank)
            self._missing = list(flags.peers)
        if self._phase == REDUCED:
            for peer in list(self._missing):
                if flags.reached(peer, number, REDUCED):
                    self._deliver(peer)
                    self._missing.remove(peer)
            if self._missing:
                return False
            self._memory.check_read(self._flags.peers)
            self._enter(TAKEN)  # from now on the other ranks may overwrite their memory
            self._parts = ()
        return all(flags.reached(peer, number, TAKEN) for peer in flags.peers)

    def may_progress(self) -> bool:
        if self._phase == WAITING:
            return True
        peers = self._missing if self._phase == REDUCED else self._flags.peers
        reached = (self._flags.reached(peer, self._number, self._phase) for peer in peers)
        return any(reached) if self._phase == REDUCED else all(reached)

    def _enter(self, phase: int) -> None:
        self._phase = phase
        self._flags.tell(self._number, phase)
        self._group.moves += 1

    def _shard(self, rank: int, owner: int) -> Buffer:
        """The contribution of ``rank`` to the owner's shard."""
        start, stop = self._shards[owner]
        if rank == self._rank:
            return self._chunk[start:stop]
        item = self._chunk.itemsize
        offset = self._flags.offset(rank, self._number) + start * item
        return self._memory.view(rank, offset, (stop - start) * item).view(self._chunk.dtype)

    def _deliver(self, owner: int) -> None:
        """Copy the owner's reduced shard to its destination on this rank."""
        shard = self._shard(owner, owner)
        begin, end = self._shards[owner]
        # Parts go to their results; the rest goes into the chunk, where this rank's shard is.
        places = [
            (max(first, begin), result[max(begin - first, 0) : end - first])
            for first, data, result in self._parts
            if result is not None and first < end and begin < first + data.size
        ]
        if owner != self._rank:
            done = begin
            for start, place in [*places]:
                places.append((done, self._chunk[done:start]))
                done = start + place.size
            places.append((done, self._chunk[done:end]))
        for start, place in places:
            place[:] = shard[start - begin : start - begin + place.size]


class SharedAllReduce:
    """The all-reduces of one channel, a window of bytes under way at once."""

    def __init__(
        self, memory: SharedMemory, flags: SharedFlags, group: ProgressGroup, window_bytes: int
    ) -> None:
        self.memory = memory
        self._flags = flags
        self._group = group
        # Two under way: one is prepared while the other waits for the other ranks.
        self._chunk_bytes = window_bytes // 2

    @classmethod
    def of(
        cls,
        memory: SharedMemory | None,
        group: ProgressGroup,
        rank: int,
        size: int,
        window_bytes: int,
    ) -> SharedAllReduce | None:
        """Those of a new channel; None without shared memory, or if no flags are left."""
        if memory is None or (number := memory.next_flag_set()) < 0:
            return None
        flags = SharedFlags(memory, rank, [(peer, number) for peer in range(size)])
        return cls(memory, flags, group, window_bytes)

    def tasks(
        self, buffer: Buffer, segments: Sequence[Segment], dtype: str, op: Op
    ) -> list[SharedReduceTask]:
        """Tasks that combine a buffer of the shared memory in place, apart from its segments."""
        item = buffer.itemsize
        parts = [
            Part(
                segment.start // item,
                typed(segment.data, dtype, writeable=False),
                None if segment.result is None else typed(segment.result, dtype),
            )
            for segment in segments
        ]
        tasks = []
        for start, stop in chunks(buffer.size, item, self._chunk_bytes):
            within = []
            for first, data, result in parts:
                if first < stop and start < first + data.size:
                    cut = slice(max(start - first, 0), stop - first)
                    piece = None if result is None else result[cut]
                    within.append(Part(max(first - start, 0), data[cut], piece))
            chunk = buffer[start:stop]
            tasks.append(
                SharedReduceTask(self.memory, self._flags, self._group, chunk, within, dtype, op)
            )
        return tasks

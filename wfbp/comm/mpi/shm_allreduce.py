"""All-reduce among ranks that can read each other's memory (``shm_memory``).

Ranks tell each other by flags in that memory how far they have come with each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wfbp.comm.backend import Buffer, Segment, combine, split, typed
from wfbp.comm.chunking import Chunking, chunks
from wfbp.comm.mpi.jobs import Job, ProgressGroup
from wfbp.comm.mpi.shm_memory import HEADER_BYTES, SharedMemory
from wfbp.core.types import Op
from wfbp.errors import BackendError

READY, REDUCED, TAKEN = 1, 2, 3
_PHASES = 4
_NUM_ROWS = 64
"""More than the jobs that a channel usually has under way; others wait for a row."""
_ROW_WORDS = 8
"""A cache line."""
_FLAG_SET_BYTES = _NUM_ROWS * _ROW_WORDS * 8
NUM_FLAG_SETS = HEADER_BYTES // _FLAG_SET_BYTES - 1
"""The first bytes of the header are the memory's own."""


class SharedFlags:
    """Flags by which each rank tells how far it is with the jobs of one channel.

    A job has one row per rank, which only that rank writes: the offset of its contribution, then
    one growing number that encodes job and phase. Jobs have the same numbers on all ranks. Rows are
    reused in turn once no rank needs them: a later job in a row shows that the earlier one is over.

    ``channel`` is the number of the channel, below :data:`NUM_FLAG_SETS`, the same on every rank.
    """

    def __init__(self, memory: SharedMemory, rank: int, size: int, channel: int) -> None:
        start = (channel + 1) * _FLAG_SET_BYTES
        self._rank = rank
        self._words = memory.views(start, _FLAG_SET_BYTES)
        self._words[:] = [
            view.view(np.int64).reshape(_NUM_ROWS, _ROW_WORDS) for view in self._words
        ]
        self.peers = [(rank + step) % size for step in range(1, size)]
        self._jobs = 0

    def next_job(self) -> int:
        """A number for a job."""
        self._jobs += 1
        return self._jobs

    def begin(self, job: int, offset: int) -> bool:
        """Publish that this rank's contribution to a job lies at ``offset``.

        False where a rank may still need the row for the job that used it before.
        """
        before = job - _NUM_ROWS
        if before > 0 and not all(self.reached(r, before, TAKEN) for r in range(len(self._words))):
            return False
        row = self._words[self._rank][job % _NUM_ROWS]
        row[1] = offset
        row[0] = job * _PHASES + READY
        return True

    def tell(self, job: int, phase: int) -> None:
        """Publish that this rank has reached a phase of a job."""
        self._words[self._rank][job % _NUM_ROWS][0] = job * _PHASES + phase

    def reached(self, rank: int, job: int, phase: int) -> bool:
        """Whether a rank has reached a phase of a job."""
        return bool(self._words[rank][job % _NUM_ROWS][0] >= job * _PHASES + phase)

    def offset(self, rank: int, job: int) -> int:
        """Where a rank's contribution lies, once it is ready."""
        return int(self._words[rank][job % _NUM_ROWS][1])


_WAITING = 0
"""For a row of the flags, before any phase."""


class Part(NamedTuple):
    """A part of a chunk that lies elsewhere, from element ``start`` on.

    ``data`` is this rank's contribution, read when the job starts; ``result`` is where the result
    goes, None for the chunk.
    """

    start: int
    data: Buffer
    result: Buffer | None


class SharedReduceJob(Job):
    """All-reduce of one chunk in shared memory, in place; ``parts`` lie elsewhere, in ascending
    order."""

    __slots__ = (
        "_chunk",
        "_dtype",
        "_flags",
        "_memory",
        "_missing",
        "_number",
        "_op",
        "_parts",
        "_phase",
        "_progress_group",
        "_rank",
        "_shards",
    )  # fmt: skip

    def __init__(
        self,
        memory: SharedMemory,
        flags: SharedFlags,
        progress_group: ProgressGroup,
        rank: int,
        chunk: Buffer,
        parts: Sequence[Part],
        dtype: str,
        op: Op,
    ) -> None:
        self.nbytes = chunk.nbytes
        self._memory = memory
        self._flags = flags
        self._progress_group = progress_group
        self._chunk = chunk
        self._parts = parts
        self._dtype = dtype
        self._op = op
        self._rank = rank
        self._number = flags.next_job()
        self._shards = split(chunk.size, len(flags.peers) + 1)
        self._phase = _WAITING

    def start(self) -> None:
        memory, chunk = self._memory, self._chunk
        offset = memory.offset(chunk)
        for start, data, _ in self._parts:
            if memory.offset(data) != offset + start * chunk.itemsize:
                chunk[start : start + data.size] = data
        self._begin()

    def _begin(self) -> None:
        if self._flags.begin(self._number, self._memory.offset(self._chunk)):
            self._phase = READY

    def step(self) -> bool:
        flags, number = self._flags, self._number
        if self._phase == _WAITING:
            self._begin()
            if self._phase == _WAITING:
                return False
        if self._phase == READY:
            if not all(flags.reached(peer, number, READY) for peer in flags.peers):
                return False
            self._combine()
            self._enter(REDUCED)
            self._deliver(self._rank)
            self._missing = list(flags.peers)
        if self._phase == REDUCED:
            for peer in list(self._missing):
                if flags.reached(peer, number, REDUCED):
                    self._deliver(peer)
                    self._missing.remove(peer)
            if self._missing:
                return False
            self._check_read()
            self._enter(TAKEN)
            self._parts = ()
        return all(flags.reached(peer, number, TAKEN) for peer in flags.peers)

    def may_progress(self) -> bool:
        if self._phase == _WAITING:
            return True
        reached = (self._flags.reached(peer, self._number, self._phase) for peer in self._awaited)
        return any(reached) if self._phase == REDUCED else all(reached)

    @property
    def _awaited(self) -> Sequence[int]:
        return self._missing if self._phase == REDUCED else self._flags.peers

    def _enter(self, phase: int) -> None:
        self._phase = phase
        self._flags.tell(self._number, phase)
        self._progress_group.moves += 1

    def _check_read(self) -> None:
        """Raise ``BackendError`` if a rank gave up before this one had read its memory."""
        gone = [peer for peer in self._flags.peers if self._memory.withdrawn(peer)]
        if gone:
            names = " and ".join(f"rank {peer}" for peer in sorted(gone))
            raise BackendError(
                f"{names} gave up before this rank had read what it needed from there, and says "
                "why. If that was for having waited too long: this rank was held up, or "
                "WFBP_TIMEOUT_S is too short"
            )

    def _combine(self) -> None:
        """Reduce this rank's shard, in the chunk."""
        shards = [self._shard(rank, self._rank) for rank in range(len(self._shards))]
        combine(shards, shards[self._rank], self._dtype, self._op)

    def _shard(self, rank: int, owner: int) -> Buffer:
        """What a rank has of the owner's shard."""
        start, stop = self._shards[owner]
        if rank == self._rank:
            return self._chunk[start:stop]
        item = self._chunk.itemsize
        offset = self._flags.offset(rank, self._number) + start * item
        return self._memory.view(rank, offset, (stop - start) * item).view(self._chunk.dtype)

    def _deliver(self, owner: int) -> None:
        """Copy the owner's shard, reduced, to where it is wanted here."""
        shard = self._shard(owner, owner)
        begin, end = self._shards[owner]
        done = begin
        for first, data, result in self._parts:
            if result is None or first >= end or first + data.size <= begin:
                continue
            start, stop = max(first, begin), min(first + data.size, end)
            self._keep(owner, shard, done, start)
            result[start - first : stop - first] = shard[start - begin : stop - begin]
            done = stop
        self._keep(owner, shard, done, end)

    def _keep(self, owner: int, shard: Buffer, start: int, stop: int) -> None:
        """Copy a part of the owner's shard into the chunk."""
        if owner != self._rank and start < stop:
            begin = self._shards[owner][0]
            self._chunk[start:stop] = shard[start - begin : stop - begin]


class SharedAllReduce:
    """Cuts all-reduces of one channel into jobs, ``window`` bytes under way at once."""

    def __init__(
        self,
        memory: SharedMemory,
        flags: SharedFlags,
        progress_group: ProgressGroup,
        rank: int,
        window: Chunking,
    ) -> None:
        self._small_bytes = window.small_bytes
        # Two under way: one is prepared while the other waits for the other ranks.
        self._chunk_bytes = window.window_bytes // 2
        self._memory = memory
        self._flags = flags
        self._progress_group = progress_group
        self._rank = rank

    @classmethod
    def of(
        cls,
        memory: SharedMemory | None,
        progress_group: ProgressGroup,
        rank: int,
        size: int,
        window: Chunking,
    ) -> SharedAllReduce | None:
        """Those of a new channel; None where there is no such memory, or no flags left."""
        if memory is None or (number := memory.next_flag_set()) >= NUM_FLAG_SETS:
            return None
        return cls(memory, SharedFlags(memory, rank, size, number), progress_group, rank, window)

    def handles(self, buffer: Buffer) -> bool:
        """Whether a buffer lies where the other ranks can read it, and is worth their while."""
        return buffer.nbytes > self._small_bytes and self._memory.holds(buffer)

    def all_reduce(
        self, buffer: Buffer, segments: Sequence[Segment], dtype: str, op: Op
    ) -> list[Job]:
        """Combine a buffer in place, but for what its segments say."""
        item = buffer.itemsize
        parts = [
            Part(
                segment.start // item,
                typed(segment.data, dtype, writeable=False),
                None if segment.result is None else typed(segment.result, dtype),
            )
            for segment in segments
        ]
        return [
            SharedReduceJob(
                self._memory,
                self._flags,
                self._progress_group,
                self._rank,
                buffer[start:stop],
                _within(parts, start, stop),
                dtype,
                op,
            )
            for start, stop in chunks(buffer.size, item, self._chunk_bytes)
        ]


def _within(parts: Sequence[Part], start: int, stop: int) -> list[Part]:
    """What lies between two elements of a buffer, counted from the first."""
    parts_within = []
    for first, data, result in parts:
        if first < stop and start < first + data.size:
            cut = slice(max(start - first, 0), stop - first)
            piece = None if result is None else result[cut]
            parts_within.append(Part(max(first - start, 0), data[cut], piece))
    return parts_within

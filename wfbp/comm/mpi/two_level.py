"""Collectives on two levels: through memory within a host, by messages between hosts.

Every rank *owns* a block. Of each block one rank per host is the *agent*; the owner is the agent of
its own host. An all-reduce takes these steps:

1. Each rank publishes where its contribution is (READY).
2. Agents combine their host's contributions in place, in rank order.
3. They send that to the owner, which combines all hosts' parts in order, and sends back the result.
4. Agents say so (REDUCED), and each rank copies the blocks of its host's agents. From then on
   (TAKEN) others may change their memory.

A reduce-scatter ends with the owner, an all-gather begins with it. On one host nothing is sent.
Flags order the data only if processors see stores in order (``shm_memory.ORDERED``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from wfbp import native
from wfbp.comm.arrays import HALF, Buffer, Piece, Segment, between, pieces, reduction, split
from wfbp.comm.backend import Work
from wfbp.comm.mpi.shm_memory import HEADER_BYTES, NUM_FLAG_SETS, SharedMemory
from wfbp.comm.mpi.topology import Topology
from wfbp.comm.mpi.transfers import Channel, ProgressGroup, Task, Watch
from wfbp.core.types import Op
from wfbp.native import copy, reduce_shards

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
    """

    def __init__(
        self,
        memory: SharedMemory,
        rank: int,
        places: Sequence[tuple[int, int]],
        group: ProgressGroup,
    ) -> None:
        self.rank, self.memory, self.group = rank, memory, group
        self.peers = [(rank + step) % len(places) for step in range(1, len(places))]
        self.places = [at for at, _ in places]
        # Items of memoryviews are read in half the time of those of arrays.
        starts = [(at, (number + 1) * _FLAG_SET_BYTES) for at, number in places]
        self.words: list[Any] = memory.views(starts, _FLAG_SET_BYTES)
        self.words[:] = [memoryview(view.view(np.int64)) for view in self.words]  # type: ignore
        self.num_tasks = 0


class FlaggedTask(Task):
    """A task that moves from phase to phase, which the ranks of a host see in flags."""

    def __init__(self, flags: SharedFlags) -> None:
        flags.num_tasks += 1
        self._flags = flags
        self._number = flags.num_tasks
        self._row = self._number % _NUM_ROWS * _ROW_WORDS
        self._phase = WAITING

    def _publish(self, buffer: Buffer | None, note: int = 0) -> bool:
        """Tell where this rank's contribution is (READY); False if there is no row for that yet."""
        # A row is reused only when no rank needs it for the previous task in it.
        before = self._number - _NUM_ROWS
        needed = before * _PHASES + TAKEN if before > 0 else 0
        if any(words[self._row] < needed for words in self._flags.words):
            return False
        words, row = self._flags.words[self._flags.rank], self._row
        words[row + 1] = 0 if buffer is None else self._flags.memory.offset(buffer)
        words[row + 2] = note
        words[row] = self._number * _PHASES + READY  # last: a rank that sees it reads the offset
        self._phase = READY
        return True

    def _enter(self, phase: int) -> None:
        flags = self._flags
        if phase == TAKEN:  # from now on the other ranks may overwrite their memory
            flags.memory.check_read(flags.places)
        self._phase = phase
        flags.words[flags.rank][self._row] = self._number * _PHASES + phase
        flags.group.moves += 1

    def _reached(self, rank: int, phase: int) -> bool:
        """Whether a rank has reached a phase of this task; a later task implies all of them."""
        reached: int = self._flags.words[rank][self._row]
        return reached >= self._number * _PHASES + phase

    def _all_reached(self, phase: int) -> bool:
        return all(self._reached(peer, phase) for peer in self._flags.peers)

    def _watch(self, ranks: Sequence[int], any_of: bool = False) -> Watch:
        """Is reached once all of these ranks, or any, have reached this rank's phase."""
        row = self._row
        flags = [self._flags.words[rank][row : row + 1] for rank in ranks]
        return flags, self._number * _PHASES + self._phase, any_of

    def _view(self, rank: int, start: int, nbytes: int) -> Buffer:
        """Bytes of a rank's contribution, once it is READY."""
        offset = self._flags.words[rank][self._row + 1]
        return self._flags.memory.view(self._flags.places[rank], offset + start, nbytes)


Bounds = Sequence[tuple[int, int]]
"""First and last element of each rank's block."""


class TwoLevelTask(FlaggedTask):
    """One chunk of a collective, in place: a part of every rank's block. Contributions that are
    elsewhere are copied from ``sources``, and results to ``results``."""

    def __init__(
        self,
        levels: TwoLevel,
        data: Buffer,
        bounds: Bounds,
        dtype: str,
        op: Op | None,
        sources: Sequence[Piece],
        results: Sequence[Piece],
        gathers: bool,
    ) -> None:
        super().__init__(levels.flags)
        self.nbytes = sum(stop - start for start, stop in bounds) * data.itemsize
        self._levels, self._memory = levels, levels.memory
        self._data, self._bounds = data, bounds
        self._sources, self._results = sources, results
        self._dtype, self._op, self._gathers = dtype, op, gathers
        self._is_combined = False
        self._sent: native.Exchange | None = None  # the messages between hosts
        self._missing = self._flags.peers
        """Ranks of this host that have not reached the next phase (REDUCED: whose blocks are not
        copied yet)."""

    def start(self) -> None:
        # Here, because only starts have the same order on every rank.
        self._tag = self._levels.channel.next_tag()
        own = [self._bounds[self._levels.rank]]
        for start, stop in own if self._op is None else self._bounds:
            for at, piece, elsewhere in between(self._sources, start, stop):
                if elsewhere:
                    copy(self._data[at : at + piece.size], piece)
        self._publish(self._data)

    def step(self) -> bool:
        if self._phase == WAITING and not self._publish(self._data):
            return False
        if self._phase == READY and not self._reduce():
            return False
        if self._phase == REDUCED:
            for peer in list(self._missing):
                if self._reached(peer, REDUCED):
                    self._deliver(peer)
                    self._missing.remove(peer)
            if self._missing:
                return False
            self._enter(TAKEN)
        if self._sent is not None and not self._sent.done:
            return False
        return self._all_reached(TAKEN)

    def awaited(self) -> Watch | None:
        phase = self._phase
        if phase == REDUCED:
            return self._watch(self._missing, any_of=True)
        if self._sent is not None and not self._sent.done:
            return (), 0, True  # for messages alone: never reached
        if phase == WAITING or (phase == READY and (self._is_combined or self._op is None)):
            return None
        return self._watch(self._flags.peers)

    def _reduce(self) -> bool:
        """Combine this rank's blocks; True, in a later phase, if that is done on all hosts."""
        flags, levels = self._flags, self._levels
        if not self._is_combined:
            if self._op is not None:
                if not self._all_reached(READY):
                    return False
                self._combine(self._op)
            self._is_combined = True
            if levels.between_hosts:
                # Before other hosts can see the sum: they cannot see who gave up here.
                self._memory.check_read(flags.peers)
                self._exchange()
            if not self._gathers:
                self._enter(TAKEN)
                return True
        if self._sent is not None and not self._sent.done:
            return False
        self._enter(REDUCED)  # before the copies: the other ranks can take the blocks meanwhile
        self._deliver(flags.rank)
        self._missing = list(flags.peers)
        return True

    def _combine(self, op: Op) -> None:
        levels, flags = self._levels, self._flags
        how, divisor = reduction(op, levels.channel.size)
        if levels.between_hosts and self._dtype not in HALF:
            divisor = 1.0  # the owner divides; but a host's sum of halves could overflow
        places = range(len(flags.peers) + 1)
        for owner in levels.blocks_of[flags.rank]:
            shards = [self._block(place, owner) for place in places]
            reduce_shards(shards, shards[flags.rank], self._dtype, how, divisor)

    def _exchange(self) -> None:
        """Combine blocks over hosts at their owners, and send the results back."""
        levels, flags = self._levels, self._flags
        how, divisor = reduction(self._op or Op.SUM, levels.channel.size)
        mine = [0], [self._data]
        self._sent = levels.channel.group.transfers.exchange(
            None,  # at once: hosts need not start them in one order
            levels.channel.handle,
            [self._tag],
            levels.rank,
            levels.agents,
            [(owner, *self._bounds[owner]) for owner in levels.blocks_of[flags.rank]],
            None if self._op is None else mine,
            mine,
            self._gathers,
            self._dtype,
            how,
            1.0 if self._dtype in HALF else divisor,
        )

    def _block(self, place: int, owner: int) -> Buffer:
        """The owner's block in the memory of a rank of this host."""
        start, stop = self._bounds[owner]
        if place == self._flags.rank:
            return self._data[start:stop]
        item = self._data.itemsize
        data = self._view(place, start * item, (stop - start) * item)
        return data.view(self._data.dtype)

    def _deliver(self, place: int) -> None:
        """Copy an agent's blocks to their destinations on this rank."""
        mine = place == self._flags.rank
        for owner in self._levels.blocks_of[place]:
            start, stop = self._bounds[owner]
            targets = [
                piece
                for piece in between(self._results, start, stop)
                if piece.elsewhere or not mine
            ]
            block = self._block(place, owner) if targets else self._data
            for at, piece, _ in targets:
                copy(piece, block[at - start : at - start + piece.size])


class TwoLevel:
    """The collectives of one channel. Ranks of a host are known by their *place* there."""

    def __init__(
        self, memory: SharedMemory, flags: SharedFlags, channel: Channel, topology: Topology
    ) -> None:
        self.memory, self.flags, self.channel = memory, flags, channel
        self.rank = channel.rank
        self.between_hosts = len(topology.hosts) > 1
        self.agents = [topology.agent(host, self.rank) for host in topology.hosts]
        """The agent of this rank's block on each host."""
        here = topology.here
        self.blocks_of: list[list[int]] = [[] for _ in here]
        """The owners of the blocks whose agent is at each place of this host."""
        for owner in range(channel.size):
            self.blocks_of[here.index(topology.agent(here, owner))].append(owner)
        # Two under way: one is prepared while the other waits for the other ranks.
        self.chunk_bytes = topology.chunking.window_bytes // 2

    @classmethod
    def of(
        cls, memory: SharedMemory | None, channel: Channel, topology: Topology
    ) -> TwoLevel | None:
        """Those of a new channel; None without shared memory, or if no flags are left."""
        if memory is None or (number := memory.next_flag_set()) < 0:
            return None
        here = topology.here
        places = [(place, number) for place in range(len(here))]
        flags = SharedFlags(memory, here.index(channel.rank), places, channel.group)
        return cls(memory, flags, channel, topology)

    def all_reduce(
        self, data: Buffer, dtype: str, op: Op, segments: Sequence[Segment]
    ) -> Work[None]:
        """Reduce a buffer in place, except for its segments."""
        shared, finish = data, None
        if not self.memory.holds(data):
            shared = self.memory.zeros(data.nbytes).view(data.dtype)
            shared[:] = data
            finish = partial(np.copyto, data, shared)
        at, offset = self.memory.offset(shared), self.memory.offset
        targets = [
            Segment(part.start, part.result)
            for part in segments
            if part.result is not None and offset(part.result) != at + part.start
        ]
        given = [part for part in segments if offset(part.data) != at + part.start]
        sources = pieces(shared, [(0, data.size)], given, dtype, writeable=False)
        results = pieces(shared, [(0, data.size)], targets, dtype)
        shares = split(data.size, self.channel.size)
        return self.submit(shared, shares, dtype, op, sources, results, finish=finish)

    def submit(
        self,
        data: Buffer,
        shares: Bounds,
        dtype: str = "uint8",
        op: Op | None = None,
        sources: Sequence[Piece] | None = None,
        results: Sequence[Piece] | None = None,
        gathers: bool = True,
        finish: Callable[[], None] | None = None,
    ) -> Work[None]:
        """Combine each rank's share by ``op``, if any; every rank gets all if ``gathers``."""
        sources, results = sources or pieces(data), results or pieces(data)
        num_chunks = max(1, -(-data.nbytes // self.chunk_bytes))
        # Each has a piece of every rank's share, so that all ranks work all the time.
        cuts = [split(stop - start, num_chunks) for start, stop in shares]
        tasks = []
        for of_chunk in zip(*cuts, strict=True):
            bounds = [
                (start + first, start + last)
                for (start, _), (first, last) in zip(shares, of_chunk, strict=True)
            ]
            tasks.append(TwoLevelTask(self, data, bounds, dtype, op, sources, results, gathers))
        return self.channel.submit(data.nbytes, tasks, finish)

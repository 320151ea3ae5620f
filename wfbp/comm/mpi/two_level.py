"""Collectives on two levels: through memory within a host, by messages between hosts.

Every rank *owns* a block. One rank per host is the *agent* of a block; the owner is one of its
agents. An all-reduce takes these steps:

1. Each rank publishes where its contribution is (READY).
2. Agents combine their host's contributions, in rank order (COMBINED).
3. They send that to the owner, which combines all hosts' parts in order, and sends back the result.
4. Agents publish that (REDUCED), and each rank copies the blocks of its host's agents. From then on
   (TAKEN) others may change their memory.

A reduce-scatter ends with the owner, an all-gather begins with it. On one host nothing is sent.
Contributions that are not in shared memory are copied there, to a staging buffer. Flags order the
data only if processors see stores in order (``shm_memory.ORDERED``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from wfbp import native
from wfbp.comm.arrays import HALF, Buffer, Piece, Segment, between, pieces, reduction, split
from wfbp.comm.backend import Work
from wfbp.comm.mpi.shm_memory import HEADER_BYTES, NUM_FLAG_SETS, SWITCH, SharedMemory
from wfbp.comm.mpi.topology import Topology
from wfbp.comm.mpi.transfers import Channel, ProgressGroup, Task, Watch
from wfbp.core.types import CODEC_BLOCK, Op
from wfbp.errors import BackendError
from wfbp.native import copy, reduce_shards

WAITING, READY, COMBINED, REDUCED, TAKEN = range(5)
"""Phases of a task; one that is WAITING for a row of flags has published nothing."""
_PHASES = 5
_ROW_WORDS = 8
"""A cache line."""
_FLAG_SET_BYTES = HEADER_BYTES // (NUM_FLAG_SETS + 1)
"""The first set's bytes of the header are reserved for ``SharedMemory``."""
_NUM_ROWS = _FLAG_SET_BYTES // (_ROW_WORDS * 8)
"""More than the tasks that a channel usually has under way; others wait for a row."""

Bounds = Sequence[tuple[int, int]]
"""First and last element of each rank's block."""
Reduce = Callable[[Sequence[Buffer], Buffer], None]
"""Combines one contribution per rank, in rank order, into a result that may be one of them."""


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
        starts = [(at, (number + 1) * _FLAG_SET_BYTES) for at, number in places]
        self.words = memory.words(starts, _FLAG_SET_BYTES)
        self.num_tasks = 0


class SharedTask(Task):
    """One chunk of a collective through the memory of a host, whose ranks see its phases in flags.

    A rank publishes its ``shared`` memory, or else a staging buffer of ``staging_bytes``.
    Subclasses define what it contributes, and what it reads of the others. On channels whose ranks
    compare operations, ``fingerprint`` tells them apart.
    """

    reads_all = True
    """Whether combining needs the contributions of all ranks."""
    gathers = True
    """Whether ranks read what others have combined."""
    messages: native.Exchange | None = None
    """Messages between hosts, which combining has begun."""
    _shared: Buffer

    def __init__(
        self,
        flags: SharedFlags,
        shared: Buffer | None = None,
        staging_bytes: int = 0,
        fingerprint: int = 0,
    ) -> None:
        flags.num_tasks += 1
        self._flags = flags
        self._number = flags.num_tasks
        self._row = self._number % _NUM_ROWS * _ROW_WORDS
        self._phase = WAITING
        self._staging_bytes, self._fingerprint = staging_bytes, fingerprint
        if shared is not None:
            self._shared = shared
        self._missing = list(flags.peers)
        """Ranks whose blocks are not copied yet."""

    @abstractmethod
    def fill(self) -> None:
        """Copy this rank's contribution to the memory that it publishes."""

    @abstractmethod
    def combine(self) -> bool:
        """Combine the contributions; False if one does not fit."""

    def deliver(self, rank: int) -> None:
        """Copy what a rank has combined to its destination, if ``gathers``."""
        raise NotImplementedError

    def start(self) -> None:
        if self._staging_bytes:
            self._shared = self._flags.memory.take(self._staging_bytes)
        self.fill()
        self._publish()

    def step(self) -> bool:
        flags = self._flags
        if self._phase == WAITING and not self._publish():
            return False
        if self._phase == READY:
            if self.reads_all and not self._all_reached(READY):
                return False
            notes = [words[self._row + 2] for words in flags.words]
            if any(note != self._fingerprint for note in notes) or not self.combine():
                self.work.mismatch = True  # the waiting thread abandons the whole channel
                return False
            self._enter(COMBINED if self.gathers else TAKEN)
        if self.messages is not None and not self.messages.done:
            return False
        if self._phase == COMBINED:
            self._enter(REDUCED)  # before the copy: the other ranks can take the blocks meanwhile
            self.deliver(flags.rank)
        if self._phase == REDUCED:
            for peer in list(self._missing):
                if self._reached(peer, REDUCED):
                    self.deliver(peer)
                    self._missing.remove(peer)
            if self._missing:
                return False
            self._enter(TAKEN)
        if not self._all_reached(TAKEN):
            return False
        if self._staging_bytes:
            flags.memory.give(self._shared)
        return True

    def awaited(self) -> Watch | None:
        if self._phase == REDUCED:
            return self._watch(self._missing, any_of=True)
        if self.messages is not None and not self.messages.done:
            return (), 0, True  # for messages alone: never reached
        if self._phase == TAKEN or (self._phase == READY and self.reads_all):
            return self._watch(self._flags.peers)
        return None

    def _publish(self) -> bool:
        """Tell where this rank's contribution is (READY); False if there is no row for that yet."""
        # A row is reused only when no rank needs it for the previous task in it.
        before = self._number - _NUM_ROWS
        needed = before * _PHASES + TAKEN if before > 0 else 0
        if any(words[self._row] < needed for words in self._flags.words):
            return False
        words, row = self._flags.words[self._flags.rank], self._row
        words[row + 1] = self._flags.memory.offset(self._shared)
        words[row + 2] = self._fingerprint
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
        return self._flags.words[rank][self._row] >= self._number * _PHASES + phase

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


class TwoLevelTask(SharedTask):
    """One chunk of a collective: a part of every rank's block, within ``data`` or a staging buffer.
    Contributions that are elsewhere are copied from ``sources``, and results to ``results``.
    ``send`` begins the messages between hosts."""

    def __init__(
        self,
        levels: TwoLevel,
        bounds: Bounds,
        sources: Sequence[Piece],
        results: Sequence[Piece],
        reduce: Reduce | None,
        data: Buffer | None = None,
        gathers: bool = True,
        send: Callable[[int, Bounds], native.Exchange] | None = None,
        fingerprint: int = 0,
    ) -> None:
        item = 1 if data is None else data.itemsize
        self.nbytes = sum(stop - start for start, stop in bounds) * item
        super().__init__(levels.flags, data, self.nbytes if data is None else 0, fingerprint)
        self.reads_all, self.gathers = reduce is not None, gathers
        self._levels, self._bounds = levels, bounds
        self._sources, self._results = sources, results
        self._reduce, self._send = reduce, send
        self._own: dict[int, Buffer] = {}
        """This rank's contributions to the blocks that it combines."""

    def fill(self) -> None:
        levels = self._levels
        if self._send is not None:
            # Here, because only starts have the same order on every rank.
            self._tag = levels.channel.next_tag()
        mine = levels.blocks_of[self._flags.rank]
        for owner in [levels.rank] if self._reduce is None else range(len(self._bounds)):
            start, stop = self._bounds[owner]
            parts = between(self._sources, start, stop)
            if self._reduce is not None and owner in mine:
                if len(parts) == 1:  # no other rank reads it: it can stay where it is
                    self._own[owner] = parts[0].data
                    continue
                self._own[owner] = self._shared[start:stop]
            for at, part, elsewhere in parts:
                if elsewhere:
                    copy(self._shared[at : at + part.size], part)

    def combine(self) -> bool:
        flags = self._flags
        if self._reduce is not None:
            for owner, own in self._own.items():
                shards = [self._block(place, owner) for place in range(len(flags.places))]
                out, shards[flags.rank] = shards[flags.rank], own
                self._reduce(shards, out)
        if self._send is not None:
            # Before other hosts can see the sum: they cannot see who gave up here.
            flags.memory.check_read(flags.places)
            self.messages = self._send(self._tag, self._bounds)
        return True

    def deliver(self, rank: int) -> None:
        mine = rank == self._flags.rank
        for owner in self._levels.blocks_of[rank]:
            start, stop = self._bounds[owner]
            parts = between(self._results, start, stop)
            targets = [part for part in parts if part.elsewhere or not mine]
            block = self._block(rank, owner) if targets else self._shared
            for at, target, _ in targets:
                copy(target, block[at - start : at - start + target.size])

    def _block(self, place: int, owner: int) -> Buffer:
        """The owner's block in the memory of a rank of this host."""
        start, stop = self._bounds[owner]
        if place == self._flags.rank:
            return self._shared[start:stop]
        item = self._shared.itemsize
        data = self._view(place, start * item, (stop - start) * item)
        return data.view(self._shared.dtype)


class TwoLevel:
    """The collectives of one channel. Ranks of a host are known by their *place* there."""

    def __init__(self, flags: SharedFlags, channel: Channel, topology: Topology) -> None:
        self.memory, self.flags, self.channel = flags.memory, flags, channel
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
        """Those of a new channel; None without shared memory, or, on one host, if no flags are
        left. Between hosts ``BackendError``: sums of messages alone have other bits."""
        if memory is None:
            return None
        if (number := memory.next_flag_set()) < 0:
            if len(topology.hosts) == 1:
                return None
            raise BackendError(
                f"rank {channel.rank} of {channel.size}: more than {NUM_FLAG_SETS // 2} channels "
                "are in use on two levels, two of them by each optimizer. Delete optimizers that "
                f"are not used any more, or set {SWITCH}=0"
            )
        here = topology.here
        places = [(place, number) for place in range(len(here))]
        flags = SharedFlags(memory, here.index(channel.rank), places, channel.group)
        return cls(flags, channel, topology)

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
        whole = [(0, data.size)]
        sources = pieces(shared, whole, given, dtype, writeable=False)
        results = pieces(shared, whole, targets, dtype)
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
        coding: native.Coding | None = None,
    ) -> Work[None]:
        """Combine each rank's share by ``op``, if any; every rank gets all if ``gathers``. With
        ``coding``, messages between hosts are encoded."""
        channel, mine = self.channel, ([0], [data])
        how, divisor = reduction(op or Op.SUM, channel.size)
        # The owner divides; but a host's sum of halves could overflow.
        early = divisor if dtype in HALF or not self.between_hosts else 1.0
        reduce = None
        if op is not None:
            reduce = partial(reduce_shards, dtype=dtype, op=how, divisor=early)

        def send(tag: int, bounds: Bounds) -> native.Exchange:
            """Combine blocks over hosts at their owners, and send the results back."""
            return channel.group.transfers.exchange(
                None,  # at once: hosts need not start them in one order
                channel.handle,
                [tag],
                self.rank,
                self.agents,
                [(owner, *bounds[owner]) for owner in self.blocks_of[self.flags.rank]],
                None if op is None else mine,
                mine,
                gathers,
                dtype,
                how,
                divisor / early,
                coding,
            )

        sources, results = sources or [Piece(0, data)], results or [Piece(0, data)]
        num_chunks = max(1, -(-data.nbytes // self.chunk_bytes))
        # Each has a piece of every rank's share, so that all ranks work all the time.
        unit = CODEC_BLOCK if coding else 1
        cuts = [
            [(a * unit, b * unit) for a, b in split((stop - start) // unit, num_chunks)]
            for start, stop in shares
        ]
        tasks = []
        for of_chunk in zip(*cuts, strict=True):
            bounds = [
                (start + first, start + last)
                for (start, _), (first, last) in zip(shares, of_chunk, strict=True)
            ]
            sends = send if self.between_hosts else None
            tasks.append(TwoLevelTask(self, bounds, sources, results, reduce, data, gathers, sends))
        return channel.submit(data.nbytes // (4 if coding else 1), tasks, finish)

    def staged(self, data: Buffer, item_bytes: int, reduce: Reduce, fingerprint: int) -> Task:
        """All-reduce of one chunk of ordinary memory, in bytes, through a staging buffer."""
        chunk = [Piece(0, data, elsewhere=True)]
        shards = split(data.nbytes // item_bytes, self.channel.size)
        bounds = [(start * item_bytes, stop * item_bytes) for start, stop in shards]
        return TwoLevelTask(self, bounds, chunk, chunk, reduce, fingerprint=fingerprint)

"""The backend on MPI: each collective's algorithm, and its tasks.

All reductions are ``comm.arrays.combine``'s, in the order of ranks. If several hosts have several
ranks each, ranks of a host are added first, then hosts in the order of their first ranks. So
results depend neither on the size of a message nor on the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from wfbp import native
from wfbp.comm.arrays import (
    INTEGER,
    Buffer,
    Piece,
    Segment,
    block_ranges,
    blocks,
    fill,
    pieces,
    reduction,
    split,
    typed,
)
from wfbp.comm.backend import Finished, HostBackend, Work
from wfbp.comm.mpi.group_exchange import GroupExchange
from wfbp.comm.mpi.point_to_point import BytesTask, PointToPoint, translating
from wfbp.comm.mpi.shm_memory import SharedMemory
from wfbp.comm.mpi.start import check_launch, communicator, load, unlink_segments
from wfbp.comm.mpi.topology import Topology
from wfbp.comm.mpi.transfers import (
    Channel,
    Chunking,
    MpiWork,
    Pace,
    ProgressGroup,
    Task,
    TransferTask,
    begin_messages,
    chunks,
    load_transfers,
)
from wfbp.comm.mpi.two_level import TwoLevel
from wfbp.core.types import Op, Operation

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiBackend(HostBackend):
    """Collectives on a duplicate of an MPI communicator. Making one is collective.

    ``comm`` is an mpi4py communicator, or ranks of ``MPI.COMM_WORLD`` (by default all). If
    ``reproducible``, several hosts add in the order of ranks, too. Raises
    ``BackendError`` if ``check_launcher`` and a launcher promised more ranks than MPI has.
    """

    def __init__(
        self,
        comm: MPI.Comm | Sequence[int] | None = None,
        chunking: Chunking | None = None,
        start_timeout_s: float | None = None,
        shared_memory: bool = True,
        reproducible: bool = False,
        check_launcher: bool = True,
        _original: MpiBackend | None = None,
        _alone: bool = False,  # only some ranks make it, in any order
        _name: str = "",
    ) -> None:
        self._mpi = mpi = load(start_timeout_s)
        chosen = communicator(mpi, comm) if isinstance(comm, Sequence) else comm
        if check_launcher and _original is None:
            check_launch(mpi, chosen)
        parent = mpi.COMM_WORLD if chosen is None else chosen
        what = "the communicator could not be duplicated; MPI has a limited number of them"
        with translating(mpi, f"rank {parent.rank} of {parent.size}", what):
            self._comm = self._own(parent)
            if _original is None:
                self._notices = PointToPoint(mpi, self._own(parent))
                self._topology = Topology.find(mpi, self._comm, chunking)
                in_one_order = reproducible and len(self._topology.hosts) > 1
                self._memory: SharedMemory | None = (
                    None if in_one_order else self._topology.connect(self._comm, shared_memory)
                )
                self._pace = Pace()
            else:
                self._notices = _original._notices
                if self._comm.size == _original.size and not _alone:
                    self._topology, self._memory = _original._topology, _original._memory
                    self._pace = _original._pace
                else:  # ranks of a subset do not find their way in the memory of all
                    self._topology, self._memory = Topology.find(mpi, self._comm, None), None
                    self._pace = Pace()
        self.rank, self.size = self._comm.rank, self._comm.size
        if self.size == mpi.COMM_WORLD.size:  # every rank is here, and has mapped all segments
            unlink_segments(mpi)
        self._who = f"rank {self.rank} of {self.size}"
        here = self._topology.here
        self.local_rank, self.local_size = here.index(self.rank), len(here)
        self.library = mpi.Get_library_version().strip("\0").splitlines()[0].strip()
        self._is_original = _original is None
        self._group: ProgressGroup = (
            ProgressGroup(load_transfers(mpi), self._who) if _original is None else _original._group
        )
        chunking = self._topology.chunking
        self._channel = Channel(self._group, chunking, mpi, self._comm, _name, self._pace)
        self._levels = TwoLevel.of(self._memory, self._channel, self._topology)
        self.progresses_alone = len(self._topology.hosts) == self.size > 1  # one rank on each
        self.on_two_levels = self._levels is not None and self._levels.between_hosts
        self.encodes = len(self._topology.hosts) > 1
        if self._levels is not None and self.on_two_levels:
            self.step_bytes = self._levels.chunk_bytes
        elif self.progresses_alone:
            self.step_bytes = chunking.chunk_bytes
        self.rests = self.progresses_alone or self.on_two_levels  # elsewhere naps are too long

    @property
    def activity(self) -> int:
        return self._group.moves

    @property
    def step_s(self) -> float | None:
        step_bytes, s_per_byte = self.step_bytes, self._pace.least_s_per_byte
        if step_bytes is None or s_per_byte is None:
            return None
        # An all-reduce sends each byte twice; the fastest message may have sent it once.
        return 2 * s_per_byte * step_bytes

    def begun(self) -> dict[str, int]:
        return self._group.begun

    def may_progress(self) -> bool:
        return self._group.may_progress()

    def rest(self, nap_s: float, most_s: float) -> bool:
        return self.rests and self._group.rest(nap_s, most_s)

    def zeros(self, nbytes: int) -> Buffer:
        return super().zeros(nbytes) if self._memory is None else self._memory.zeros(nbytes)

    def copies_segments(self, buffer: Buffer) -> bool:
        return self._levels_for(Operation.ALL_REDUCE, buffer) is not None

    def all_reduce(
        self, buffer: Buffer, dtype: str, op: Op, segments: Sequence[Segment] = ()
    ) -> Work[None]:
        data = typed(buffer, dtype)
        if self.size == 1:
            fill(buffer, [data.nbytes], segments, dtype)
        if self.size == 1 or data.size == 0:
            return Finished(None)
        if (levels := self._levels_for(Operation.ALL_REDUCE, data, dtype, op)) is not None:
            return levels.all_reduce(data, dtype, op, segments)
        sources = pieces(data, [(0, data.size)], segments, dtype, writeable=False)
        if data.nbytes * (self.size - 1) <= self._topology.chunking.small_bytes:
            # Each rank sends all of its contribution, and combines all of the result.
            shares = [(0, data.size)] * self.size
            return self._exchange(data, shares, dtype, op, sources, gathers=False)
        return self._exchange(data, split(data.size, self.size), dtype, op, sources)

    def reduce_scatter(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        dtype: str,
        op: Op,
        segments: Sequence[Segment] = (),
    ) -> Work[None]:
        data, shares = typed(buffer, dtype), block_ranges(self.size, buffer.nbytes, counts, dtype)
        levels = self._levels_for(Operation.REDUCE_SCATTER, buffer, dtype, op)
        if self.size == 1:
            fill(buffer, counts, segments, dtype)
        if self.size == 1 or buffer.nbytes == 0:
            return Finished(None)
        sources = pieces(data, shares, segments, dtype, writeable=False)
        if levels is not None:
            return levels.submit(data, shares, dtype, op, sources, gathers=False)
        return self._exchange(data, shares, dtype, op, sources, gathers=False)

    def reduce_encoded(
        self,
        buffer: Buffer,
        counts: Sequence[int],
        op: Op,
        segments: Sequence[Segment],
        coding: native.Coding,
        results: Sequence[Segment] | None = None,
    ) -> Work[None]:
        data = typed(buffer, "float32")
        shares = block_ranges(self.size, buffer.nbytes, counts, "float32")
        sources = pieces(data, shares, segments, "float32", writeable=False)
        gathers, places = results is not None, pieces(data, shares, results or (), "float32")
        if self._levels is not None:
            return self._levels.submit(
                data, shares, "float32", op, sources, places, gathers, coding=coding
            )
        return self._exchange(data, shares, "float32", op, sources, places, gathers, coding)

    def all_gather(
        self, buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment] = ()
    ) -> Work[None]:
        data, shares = typed(buffer, "uint8"), block_ranges(self.size, buffer.nbytes, counts)
        if self.size == 1 or buffer.nbytes == 0:
            return Finished(None)
        arrays = pieces(data, shares, segments, "uint8")
        if (levels := self._levels_for(Operation.ALL_GATHER, buffer)) is not None:
            return levels.submit(data, shares, sources=arrays, results=arrays)
        return self._exchange(data, shares, results=arrays)

    def broadcast(self, buffer: Buffer, root: int) -> Work[None]:
        data = typed(buffer, "uint8")
        if self.size == 1 or data.size == 0:
            return Finished(None)
        tasks = [
            self._library_task(b - a, partial(self._comm.Ibcast, data[a:b], root))
            for a, b in chunks(data.size, 1, self._topology.chunking.chunk_bytes)
        ]
        return self._channel.submit(data.nbytes, tasks)

    def all_gather_bytes(self, payload: bytes) -> Work[list[bytes]]:
        if self.size == 1:
            return Finished([bytes(payload)])
        task = BytesTask(self._channel, bytes(payload))
        return self._channel.submit(task.nbytes, [task], task.value)

    def all_to_all(
        self, outgoing: Buffer, sent: Sequence[int], incoming: Buffer, received: Sequence[int]
    ) -> Work[None]:
        out = blocks(self.size, outgoing, sent, "uint8", writeable=False)
        back = blocks(self.size, incoming, received, "uint8")
        if self.size == 1:
            back[0][:] = out[0]
            return Finished(None)
        begin = partial(begin_messages, channel=self._channel, outgoing=out, incoming=back)
        task = TransferTask(outgoing.nbytes, begin)
        return self._channel.submit(outgoing.nbytes - out[self.rank].nbytes, [task])

    def duplicate(self) -> MpiBackend:
        return MpiBackend(self._comm, _original=self, _name=self._next_name())

    def subset(self, ranks: Sequence[int]) -> MpiBackend | None:
        what, name = f"no communicator could be made of ranks {list(ranks)}", self._next_name()
        with translating(self._mpi, self._who, what):
            color = 0 if self.rank in ranks else self._mpi.UNDEFINED
            comm = self._comm.Split(color, self.rank)
        if comm == self._mpi.COMM_NULL:
            return None
        made = MpiBackend(comm, _original=self, _name=name)
        comm.Free()
        return made

    def among(self, ranks: Sequence[int], tag: int, name: str) -> GroupExchange:
        """Collectives among these ranks, in this order, by a name that no others have. Blocking,
        and collective among them alone, on any thread."""
        what = f"no communicator could be made of ranks {list(ranks)}"
        with translating(self._mpi, self._who, what):
            comm = self._comm.Create_group(  # type: ignore[attr-defined]
                self._comm.group.Incl(list(ranks)), tag
            )
            made = MpiBackend(comm, _original=self, _alone=True, _name=name)
            comm.Free()
            here = self._topology.here
            memory = self._memory if set(ranks) <= set(here) else None
            places = [here.index(rank) for rank in ranks] if memory else []
            return GroupExchange(made, made._channel, memory, places, made._topology, ranks)

    def send_notice(self, rank: int, payload: bytes) -> None:
        self._notices.send(rank, payload)

    def poll_notices(self) -> list[tuple[int, bytes]]:
        return self._notices.receive()

    @property
    def sends_notices(self) -> bool:
        return self._notices.sending

    def give_up(self) -> None:
        self._group.give_up()
        if self._memory is not None:
            self._memory.withdraw()

    def release(self) -> None:
        if self._memory is not None:
            self._memory.release()

    def abort(self, code: int) -> None:
        unlink_segments(self._mpi)
        # MPICH 4.0 ends no other rank if the communicator is a duplicate.
        world = self._mpi.COMM_WORLD
        (world if world.size == self.size else self._comm).Abort(code)

    def close(self) -> None:
        """Free the communicators. Collective; every work must be complete."""
        if self._is_original:
            self.give_up()
        self._channel.leave()
        if self._is_original:  # duplicates use the same communicator for notices
            self._notices.close()
        with translating(self._mpi, self._who, "closing failed"):
            self._comm.Free()

    def _levels_for(
        self, operation: Operation, buffer: Buffer, dtype: str = "uint8", op: Op = Op.SUM
    ) -> TwoLevel | None:
        """Two levels if a collective takes them; None: messages from every rank to every other."""
        levels, chunking = self._levels, self._topology.chunking
        if levels is None:
            return None
        here, reduces = levels.memory.holds(buffer), operation is Operation.ALL_REDUCE
        if not levels.between_hosts:
            # A few ranks exchange small messages in less time.
            small = buffer.nbytes * (self.size - 1) <= chunking.small_bytes
            wanted = here and reduces and not (small and self.size <= chunking.direct_ranks)
        else:  # by one way whatever the size, so that sums have one order
            # Integers are averaged as 64 bits, which parts of other hosts do not have.
            wanted = (here or reduces) and not (dtype in INTEGER and op is Op.AVERAGE)
        return levels if wanted else None

    def _library_task(self, nbytes: int, begin: Callable[[], MPI.Request]) -> Task:
        """A collective of the MPI library, which moves data. None reduces: libraries add in an
        order that depends on sizes."""

        def start(task: Task) -> native.Transfer:
            # Its handle becomes invalid when the transfer is done.
            task.request = begin()
            return self._group.transfers.adopt(self._mpi._handleof(task.request))

        return TransferTask(nbytes, start)

    def _exchange(
        self,
        data: Buffer,
        shares: Sequence[tuple[int, int]],
        dtype: str = "uint8",
        op: Op = Op.SUM,
        sources: Sequence[Piece] | None = None,
        results: Sequence[Piece] | None = None,
        gathers: bool = True,
        coding: native.Coding | None = None,
    ) -> MpiWork[None]:
        """Combine the ``sources``, if any, of each rank's share, into ``results`` or the buffer;
        every rank gets all results if ``gathers``."""
        channel, given = self._channel, None
        nbytes = data.size if coding else data.nbytes  # an encoded float32 takes about a byte
        num_chunks = -(-nbytes // self._topology.chunking.chunk_bytes)
        if sources is not None:
            starts, arrays, _ = zip(*sources, strict=True)
            given = starts, arrays
        starts, arrays, _ = zip(*(results or [Piece(0, data)]), strict=True)

        def begin(_: Task) -> native.Exchange:  # keeps the memory of the arrays
            return self._group.transfers.exchange(
                channel.chunk_window,
                channel.handle,
                channel.chunk_tags(num_chunks),
                self.rank,
                range(self.size),
                [(owner, *shares[owner]) for owner in (*channel.peers, self.rank)],
                given,
                (starts, arrays),
                gathers,
                dtype,
                *reduction(op, self.size),
                coding,
            )

        return channel.submit(nbytes, [TransferTask(0, begin)])

    def _next_name(self) -> str:
        """The name of the next backend that all ranks of this one make."""
        self._channel.num_made += 1
        return f"{self._channel.name}.{self._channel.num_made}"

    def _own(self, parent: MPI.Comm) -> MPI.Comm:
        # A duplicate: neither tags nor collectives can meet those of the program.
        comm = parent.Dup()
        comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        return comm

"""Which way a collective's messages go, and the jobs that it is cut into.

Small all-reduces go by the library's own collectives; large ones, half precision and the cases
that the library does not define by direct exchange (``jobs``), in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wfbp.comm.backend import HALF, INTEGER, Buffer, Pieces, divide, split
from wfbp.comm.chunking import NETWORK, Chunking, chunks, scatters_directly, within_host
from wfbp.comm.mpi.jobs import (
    DirectGather,
    DirectReduce,
    Job,
    LibraryCollective,
    ProgressGroup,
    Scratch,
)
from wfbp.core.types import Op

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Topology:
    """What decides how messages travel among the ranks of a communicator.

    Args:
        local_rank: among the ranks of this host.
        local_size: their number.
        direct: whether large messages are exchanged directly, each rank with every other.
        scatters_directly: whether a reduce-scatter is.
        shared: whether all ranks share this host, and are few enough for direct exchange.
        one_rank_per_host: whether no two ranks share a host.
    """

    local_rank: int
    local_size: int
    chunking: Chunking
    direct: bool
    scatters_directly: bool
    shared: bool = False
    one_rank_per_host: bool = False

    @classmethod
    def find(cls, mpi: ModuleType, comm: MPI.Comm, chunking: Chunking | None) -> Topology:
        """Find out which ranks share a host, and how messages travel best there. Collective."""
        node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        local_rank, local_size = node.rank, node.size
        node.Free()
        fullest = comm.allreduce(local_size, mpi.MAX)
        one_host = local_size == comm.size
        if chunking is None:
            open_mpi = mpi.get_vendor()[0] == "Open MPI"
            chunking = within_host(comm.size, open_mpi) if one_host else NETWORK
        # Where hosts hold several ranks each, direct exchange would send every byte between hosts
        # once per rank of the host; the library's algorithms send it once.
        direct = comm.size <= chunking.direct_ranks and (one_host or fullest == 1)
        return cls(
            local_rank,
            local_size,
            chunking,
            direct,
            one_host or scatters_directly(comm.size, fullest),
            one_host and direct and comm.size > 1,
            fullest == 1 and comm.size > 1,
        )


class Routing:
    """Cuts the collectives of one communicator into jobs."""

    def __init__(
        self, mpi: ModuleType, comm: MPI.Comm, progress_group: ProgressGroup, topology: Topology
    ) -> None:
        self._mpi = mpi
        self._comm = comm
        self._progress_group = progress_group
        self._topology = topology
        self._scratch = Scratch()
        self._sequence = 0
        self._ops = {
            Op.SUM: mpi.SUM,
            Op.AVERAGE: mpi.SUM,
            Op.MIN: mpi.MIN,
            Op.MAX: mpi.MAX,
            Op.PRODUCT: mpi.PROD,
        }

    def next_number(self) -> int:
        """The number of the next job that sends under tags of its own."""
        self._sequence += 1
        return self._sequence

    def exchanges(self, nbytes: int, dtype: str, op: Op) -> bool:
        """Whether an all-reduce goes by direct exchange."""
        topology = self._topology
        return needs_exchange(dtype, op) or (
            topology.direct and nbytes > topology.chunking.small_bytes
        )

    def scatters(self, dtype: str, op: Op) -> bool:
        """Whether a reduce-scatter is one, and not part of an all-reduce."""
        return self._topology.scatters_directly or needs_exchange(dtype, op)

    @property
    def gathers(self) -> bool:
        """Whether an all-gather goes by direct exchange."""
        return self._topology.direct

    def all_reduce(self, source: Pieces, result: Buffer, dtype: str, op: Op) -> list[Job]:
        """Combine ``source`` into ``result`` by direct exchange; a piece may be its own result."""
        jobs = []
        for start, stop in self._chunks(result):
            cut = [(start + a, start + b) for a, b in split(stop - start, self._comm.size)]
            shards, results = [source[a:b] for a, b in cut], [result[a:b] for a, b in cut]
            jobs.append(self._exchange(shards, results, dtype, op, gather=True))
        return jobs

    def library_reduce(self, data: Buffer, op: Op) -> list[Job]:
        """All-reduce in place by the library."""
        return [self._library_reduce(data[a:b], op) for a, b in self._chunks(data)]

    def reduce_scatter(
        self, sources: Sequence[Pieces], result: Buffer, dtype: str, op: Op
    ) -> list[Job]:
        """Combine one part per rank; the own part's result goes into ``result``."""
        jobs = []
        cut = self._cut([source.size for source in sources], result.itemsize)
        for piece in cut:
            shards = [source[a:b] for source, (a, b) in zip(sources, piece, strict=True)]
            start, stop = piece[self._comm.rank]
            results = [result[start:stop]] * len(shards)
            jobs.append(self._exchange(shards, results, dtype, op, gather=False))
        return jobs

    def all_gather(self, parts: Sequence[Pieces]) -> list[Job]:
        """Gather one part per rank by direct exchange."""
        return [
            DirectGather(
                self._comm,
                self._progress_group,
                self.next_number(),
                [part[a:b] for part, (a, b) in zip(parts, piece, strict=True)],
            )
            for piece in self._cut([part.size for part in parts], 1)
        ]

    def library_gather(
        self, whole: Buffer, starts: Sequence[int], counts: Sequence[int]
    ) -> list[Job]:
        """All-gather by the library: of each rank so many bytes of a buffer, from there on."""
        return [
            self._library_gather(
                whole,
                [b - a for a, b in piece],
                [start + a for start, (a, _) in zip(starts, piece, strict=True)],
            )
            for piece in self._cut(counts, 1)
        ]

    def _chunks(self, data: Buffer) -> list[tuple[int, int]]:
        return chunks(data.size, data.itemsize, self._topology.chunking.chunk_bytes)

    def _cut(self, sizes: Sequence[int], item_bytes: int) -> list[tuple[tuple[int, int], ...]]:
        """Chunks that have a piece of every rank's part, so that all ranks work all the time."""
        nbytes = sum(sizes) * item_bytes
        num_chunks = -(-nbytes // self._topology.chunking.chunk_bytes)
        return list(zip(*(split(size, num_chunks) for size in sizes), strict=True))

    def _exchange(
        self,
        shards: Sequence[Sequence[Buffer]],
        results: Sequence[Buffer],
        dtype: str,
        op: Op,
        gather: bool,
    ) -> Job:
        comm, progress_group, scratch, number = (
            self._comm,
            self._progress_group,
            self._scratch,
            self.next_number(),
        )
        return DirectReduce(
            comm, progress_group, scratch, number, shards, results, dtype, op, gather
        )

    def _library_reduce(self, data: Buffer, op: Op) -> Job:
        size = self._comm.size
        after = (lambda: divide(data, size)) if op is Op.AVERAGE else None
        operation = self._ops[op]
        in_place = self._mpi.IN_PLACE
        return LibraryCollective(
            data.nbytes, lambda: self._comm.Iallreduce(in_place, data, operation), after
        )

    def _library_gather(self, whole: Buffer, counts: Sequence[int], starts: Sequence[int]) -> Job:
        spec = [whole, counts, starts, self._mpi.BYTE]
        in_place = self._mpi.IN_PLACE
        return LibraryCollective(sum(counts), lambda: self._comm.Iallgatherv(in_place, spec))


def needs_exchange(dtype: str, op: Op) -> bool:
    """Whether MPI's own all-reduce cannot be trusted with it (see ``jobs``)."""
    if dtype in HALF:
        return True
    if dtype in INTEGER:
        return op is Op.AVERAGE
    return op in (Op.MIN, Op.MAX)

"""The placement of a communicator's ranks, and the algorithms that suit it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wfbp.comm.mpi.transfers import Chunking

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Topology:
    """How a communicator's ranks are placed, which decides how messages travel."""

    local_rank: int
    local_size: int
    chunking: Chunking
    # Whether ranks exchange large messages directly; the same for a reduce-scatter.
    direct: bool
    scatters_directly: bool
    # Whether all ranks share this host, and are few enough for direct exchange.
    shared: bool = False
    one_rank_per_host: bool = False

    @classmethod
    def find(cls, mpi: ModuleType, comm: MPI.Comm, chunking: Chunking | None) -> Topology:
        """Find which ranks share a host, and the best algorithms there. Collective."""
        node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        local_rank, local_size = node.rank, node.size
        node.Free()
        size, fullest = comm.size, comm.allreduce(local_size, mpi.MAX)
        one_host = local_size == size
        if chunking is None and one_host:
            # Copies within a host do not overlap and would evict each other from the cache, so
            # large messages go one chunk at a time. Open MPI copies through small fragments; it
            # gains from shards that stay in cache from arrival to reduction.
            open_mpi = mpi.get_vendor()[0] == "Open MPI"
            chunk_bytes = min(4 << 20, size << 19) if open_mpi else 4 << 20
            chunking = Chunking(chunk_bytes=chunk_bytes, window_bytes=chunk_bytes)
        chunking = chunking or Chunking()
        # If hosts hold several ranks each, direct exchange sends every byte between hosts once
        # per rank of the host; the library's algorithms send it once.
        direct = size <= chunking.direct_ranks and (one_host or fullest == 1)
        # A reduce-scatter is different: the library's all-reduce, which carries it otherwise, sends
        # twice as many bytes as it must if the number of ranks is a power of two, and at other
        # numbers more than direct exchange.
        scatters = one_host or fullest <= 2 or size & (size - 1) != 0
        shared, alone = one_host and direct and size > 1, fullest == 1 and size > 1
        return cls(local_rank, local_size, chunking, direct, scatters, shared, alone)

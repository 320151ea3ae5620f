"""The placement of a communicator's ranks, and the sizes of chunks that suit it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wfbp.comm.mpi.shm_memory import SharedMemory
from wfbp.comm.mpi.transfers import Chunking

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


@dataclass(frozen=True, slots=True)
class Topology:
    """How a communicator's ranks are placed, which decides how messages travel."""

    hosts: tuple[tuple[int, ...], ...]  # the ranks of each, in order of the first
    rank: int
    chunking: Chunking

    @classmethod
    def find(cls, mpi: ModuleType, comm: MPI.Comm, chunking: Chunking | None) -> Topology:
        """Find which ranks share a host, and the best sizes there. Collective."""
        node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        hosts = tuple(sorted(set(comm.allgather(tuple(node.allgather(comm.rank))))))
        node.Free()
        if chunking is None and len(hosts) == 1:
            # Copies within a host do not overlap and would evict each other from the cache, so
            # large messages go one chunk at a time. Open MPI copies through small fragments; it
            # gains from shards that stay in cache from arrival to reduction. Small messages go in
            # one exchange: where ranks share cores, a second one waits for its turn.
            open_mpi = mpi.get_vendor()[0] == "Open MPI"
            chunk_bytes = min(4 << 20, comm.size << 19) if open_mpi else 4 << 20
            chunking = Chunking(chunk_bytes, window_bytes=chunk_bytes, small_bytes=256 << 10)
        elif chunking is None and len(hosts) == comm.size:
            # Small enough that a piece which has arrived is still in cache when it is reduced, and
            # what is under way beside it. A smaller window leaves a slow link idle while ranks nap.
            chunking = Chunking(chunk_bytes=256 << 10, window_bytes=2 << 20)
        return cls(hosts, comm.rank, chunking or Chunking())

    def connect(self, comm: MPI.Comm, wanted: bool) -> SharedMemory | None:
        """The memory of this host's ranks; None everywhere if it is missing anywhere. Collective
        over ``comm``."""
        if all(len(host) == 1 for host in self.hosts):
            return None
        node = comm.Split(self.here[0], comm.rank)
        memory = SharedMemory.connect(node, wanted, self.here)
        node.Free()
        return memory if all(comm.allgather(memory is not None)) else None

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return next(host for host in self.hosts if self.rank in host)

    def agent(self, host: Sequence[int], owner: int) -> int:
        """The rank of a host that serves a rank's block there."""
        if owner in host:
            return owner
        place = next(other.index(owner) for other in self.hosts if owner in other)
        return host[place % len(host)]

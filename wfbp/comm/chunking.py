"""How a message is cut: into chunks that travel one after the other, and chunks into shards."""

from __future__ import annotations

from dataclasses import dataclass

from wfbp.comm.backend import split


@dataclass(frozen=True, slots=True)
class Chunking:
    """Sizes that decide how a message travels; measured in docs/benchmarks/communication.md.

    Args:
        chunk_bytes: a message is cut into equal chunks of at most this size. Large enough that
            start-up vanishes, small enough that phases of different chunks overlap on a link and
            that a chunk is still in cache when it is reduced.
        window_bytes: chunks under way at once, together. More than one, so that the link has
            work while a finished chunk waits to be noticed.
        window_jobs: the same as a count, for small messages.
        small_bytes: up to here the library's own all-reduce is quicker than two exchanges.
        direct_ranks: up to this many ranks every rank exchanges with every other directly, on
            one host or with one rank on each; beyond, and where hosts hold several ranks each,
            large messages go through the library's all-reduce and all-gather too.
    """

    chunk_bytes: int = 1 << 20
    window_bytes: int = 3 << 20
    window_jobs: int = 8
    small_bytes: int = 64 << 10
    direct_ranks: int = 16

    def __post_init__(self) -> None:
        if not 64 <= self.chunk_bytes <= 1 << 30 or self.window_jobs < 1:
            raise ValueError(
                f"chunks of 64 bytes to 1 GiB (MPI counts to 2 GiB), a window of at least 1: {self}"
            )


NETWORK = Chunking()
"""Between hosts: phases of successive chunks overlap, so chunks are small."""


def within_host(num_ranks: int, open_mpi: bool) -> Chunking:
    """Sizes within a host.

    Copies do not overlap and would evict each other from the cache, so large messages go one chunk
    at a time.

    Open MPI copies through small fragments; it gains from shards that stay in cache from arrival to
    reduction.

    >>> within_host(2, open_mpi=True).chunk_bytes >> 10
    1024
    """
    chunk_bytes = min(4 << 20, num_ranks << 19) if open_mpi else 4 << 20
    return Chunking(chunk_bytes=chunk_bytes, window_bytes=chunk_bytes)


def scatters_directly(num_ranks: int, ranks_per_host: int) -> bool:
    """Whether a reduce-scatter between hosts goes by direct exchange, or as part of an all-reduce.

    By direct exchange a host sends ``ranks_per_host`` times as many bytes as it must; the
    library's all-reduce sends twice as many where the number of ranks is a power of two, and at
    other numbers more than direct exchange.

    >>> scatters_directly(8, 2), scatters_directly(8, 4), scatters_directly(6, 3)
    (True, False, True)
    """
    return ranks_per_host <= 2 or num_ranks & (num_ranks - 1) != 0


def chunks(numel: int, item_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """Start and end of the chunks of a message, in elements; one empty chunk for none.

    >>> chunks(10, 4, 16)
    [(0, 3), (3, 6), (6, 10)]
    """
    return split(numel, max(1, -(-numel * item_bytes // chunk_bytes)))

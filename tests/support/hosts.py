"""Ranks of one machine as if they were on several hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wfbp.comm.mpi.topology import Topology
from wfbp.comm.mpi.transfers import Chunking

Hosts = tuple[tuple[int, ...], ...]


def in_turn(size: int, number: int) -> Hosts:
    """At most so many hosts; ranks go to them in turn, so that some have one more."""
    hosts = [tuple(range(first, size, number)) for first in range(min(number, size))]
    return tuple(hosts)


def in_rows(sizes: Sequence[int]) -> Hosts:
    """Hosts with so many consecutive ranks."""
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return tuple(tuple(range(end - n, end)) for end, n in zip(ends, sizes, strict=True))


@contextmanager
def as_on_hosts(layout: Callable[[int], Hosts]) -> Iterator[None]:
    """Within it backends are made as if the layout (of the number of ranks) were true."""
    found = vars(Topology)["find"]

    def find(_: Any, mpi: Any, comm: Any, chunking: Chunking | None) -> Topology:
        real = found.__func__(Topology, mpi, comm, chunking)
        hosts = layout(comm.size)
        chosen = chunking or (real.chunking if len(hosts) == 1 else Chunking())
        return Topology(hosts, comm.rank, chosen)

    Topology.find = classmethod(find)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Topology.find = found  # type: ignore[method-assign]

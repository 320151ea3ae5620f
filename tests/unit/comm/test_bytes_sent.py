"""Steps and bytes of each collective, as ``docs/explanation/collectives.md`` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.fake_mpi import FakeMpi
from tests.support.host_ranks import connected, plain_channel
from wfbp import native
from wfbp.comm.arrays import Buffer
from wfbp.comm.backend import Work
from wfbp.comm.mpi import two_level
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.comm.mpi.shm_memory import SharedMemory
from wfbp.comm.mpi.topology import Topology
from wfbp.comm.mpi.transfers import Chunking, ProgressGroup
from wfbp.comm.mpi.two_level import TwoLevel
from wfbp.core.types import Op

CHUNKING = Chunking(small_bytes=1024)
NBYTES = 4 * 48 * 60
"""All ranks' blocks are equal, and no collective of so many bytes is small."""

HOSTS = ((2, 2), (3, 2), (2, 4))

Act = Callable[[MpiBackend, Buffer], Work[None]]


def all_reduce(backend: MpiBackend, data: Buffer) -> Work[None]:
    return backend.all_reduce(data, "float32", Op.SUM)


def reduce_scatter(backend: MpiBackend, data: Buffer) -> Work[None]:
    counts = [data.nbytes // backend.size] * backend.size
    return backend.reduce_scatter(data, counts, "float32", Op.SUM)


def all_gather(backend: MpiBackend, data: Buffer) -> Work[None]:
    return backend.all_gather(data, [data.nbytes // backend.size] * backend.size)


def all_to_all(backend: MpiBackend, data: Buffer) -> Work[None]:
    counts = [data.nbytes // backend.size] * backend.size
    return backend.all_to_all(data, counts, np.zeros_like(data), counts)


def backend_of(
    mpi: FakeMpi, hosts: tuple[tuple[int, ...], ...], rank: int, memory: SharedMemory | None
) -> MpiBackend:
    """A rank's backend on a library that only notes what is sent."""
    made: Any = object.__new__(MpiBackend)
    made.rank, made.size = rank, sum(map(len, hosts))
    made._topology = Topology(hosts, rank, CHUNKING)
    made._group = ProgressGroup(native.Transfers(**mpi.told), "")
    made._channel = plain_channel(made._group, CHUNKING, rank, made.size)
    made._levels = TwoLevel.of(memory, made._channel, made._topology)
    found: MpiBackend = made
    return found


def steps_and_bytes(libraries: list[FakeMpi], works: list[Work[None]]) -> set[tuple[int, int]]:
    """Of each rank of a host: how often it has sent messages, and how many bytes."""
    steps, ended = [0] * len(works), [0] * len(works)
    while not all(work.test() for work in works):
        for _ in range(4 * len(works)):  # whatever needs no message
            for work in works:
                work.test()
        for k, mpi in enumerate(libraries):
            new = range(ended[k], len(mpi.begun))
            steps[k] += any(mpi.begun[number][0] == "send" for number in new)
            mpi.end(*new)
            ended[k] = len(mpi.begun)
    sent = [sum(m[2] for m in mpi.begun if m[0] == "send") for mpi in libraries]
    return set(zip(steps, sent, strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("act", "nbytes", "steps", "sent"),
    [
        (all_reduce, NBYTES, 2, lambda n, p: 2 * n * (p - 1) // p),
        (all_reduce, 48, 1, lambda n, p: n * (p - 1)),
        (reduce_scatter, NBYTES, 1, lambda n, p: n * (p - 1) // p),
        (all_gather, NBYTES, 1, lambda n, p: n * (p - 1) // p),
        (all_to_all, NBYTES, 1, lambda n, p: n * (p - 1) // p),
    ],
)
def test_messages(
    act: Act, nbytes: int, steps: int, sent: Callable[[int, int], int], size: int
) -> None:
    for rank in range(size):
        mpi = FakeMpi(4, 16)
        backend = backend_of(mpi, tuple((r,) for r in range(size)), rank, None)
        work = act(backend, np.zeros(nbytes, np.uint8))
        assert steps_and_bytes([mpi], [work]) == {(steps, sent(nbytes, size))}


@pytest.mark.parametrize(
    ("act", "stages", "num_hosts", "per_host"),
    [
        (all_reduce, 2, 1, 2),
        (all_reduce, 2, 1, 3),
        *((all_reduce, 2, *hosts) for hosts in HOSTS),
        *((reduce_scatter, 1, *hosts) for hosts in HOSTS),
        *((all_gather, 1, *hosts) for hosts in HOSTS),
    ],
)
def test_two_levels(
    act: Act, stages: int, num_hosts: int, per_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one host's ranks; ``stages``: a reduction and an all-gather, or one of these."""
    size = num_hosts * per_host
    read = 0

    def reduce_shards(shards: list[Buffer], out: Buffer, **how: Any) -> None:
        nonlocal read
        read += (len(shards) - 1) * out.nbytes
        native.reduce_shards(shards, out, **how)

    def copy(target: Buffer, source: Buffer) -> None:
        nonlocal read
        read += source.nbytes
        native.copy(target, source)

    monkeypatch.setattr(two_level, "reduce_shards", reduce_shards)
    monkeypatch.setattr(two_level, "copy", copy)
    hosts = tuple(tuple(range(h * per_host, (h + 1) * per_host)) for h in range(num_hosts))
    libraries = [FakeMpi(4, 16) for _ in hosts[0]]
    memories = connected(per_host)
    works = []
    for rank, (mpi, memory) in enumerate(zip(libraries, memories, strict=True)):
        backend = backend_of(mpi, hosts, rank, memory)
        works.append(act(backend, memory.zeros(NBYTES)))
    steps = stages if num_hosts > 1 else 0
    sent = stages * (num_hosts - 1) * NBYTES // size
    assert steps_and_bytes(libraries, works) == {(steps, sent)}
    assert read == per_host * stages * NBYTES * (per_host - 1) // per_host

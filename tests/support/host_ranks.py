"""Ranks as threads that share a host's memory, and what they need to reduce through it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from tests.support.fake_mpi import FakeMpi
from wfbp import native
from wfbp.comm.mpi.shm_memory import SharedMemory
from wfbp.comm.mpi.topology import Topology
from wfbp.comm.mpi.transfers import Channel, Chunking, Pace, ProgressGroup
from wfbp.comm.mpi.two_level import TwoLevel

T = TypeVar("T")
WINDOW = Chunking(window_bytes=4096, small_bytes=64)


class ThreadComm:
    """As much of a communicator as connecting needs, with ranks as threads."""

    def __init__(self, size: int) -> None:
        self._said: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=60)
        self._here = threading.local()
        self.size = size

    @property
    def rank(self) -> int:
        """Of the thread that asks."""
        rank: int = self._here.rank
        return rank

    def allgather(self, value: T) -> list[T]:
        self._said[self.rank] = value
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found

    def run(self, function: Callable[[], T]) -> list[T]:
        """What the function returns on each rank."""
        found: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            self._here.rank = rank
            found[rank] = function()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def connected(size: int) -> list[SharedMemory]:
    """The memory as each rank sees it."""
    comm = ThreadComm(size)
    found = comm.run(lambda: SharedMemory.connect(comm))  # type: ignore[arg-type]
    memories = [memory for memory in found if memory is not None]
    if len(memories) < size:
        pytest.skip("this machine has no memory that processes can read of each other")
    return memories


def group(rank: int, size: int) -> ProgressGroup:
    """A progress group whose transfers are never used."""
    return ProgressGroup(native.Transfers(**FakeMpi(4, 0).told), f"rank {rank} of {size}")


def channel(
    memory: SharedMemory, rank: int, size: int, window: Chunking = WINDOW
) -> tuple[TwoLevel, Channel]:
    """A rank's end of a new channel."""
    line = plain_channel(group(rank, size), window, rank, size)
    levels = TwoLevel.of(memory, line, Topology((tuple(range(size)),), rank, window))
    assert levels is not None
    return levels, line


def plain_channel(
    progress_group: ProgressGroup, window: Chunking = WINDOW, rank: int = 0, size: int = 2
) -> Channel:
    """A channel without a communicator, for tasks that need none."""
    mpi: Any = SimpleNamespace(_handleof=lambda _: 7)
    comm: Any = SimpleNamespace(rank=rank, size=size)
    return Channel(progress_group, window, mpi, comm, "", Pace())

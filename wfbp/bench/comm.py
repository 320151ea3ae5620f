"""Times all-reduces of wfbp's MPI backend and the MPI library's own, alternately, by size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from wfbp.comm.mpi.backend import MpiBackend
from wfbp.comm.waiting import Waiter, wait
from wfbp.core.types import Op

BUDGET_BYTES = 64 << 20
"""A block of small messages has about so many bytes."""
MOST_REPEATS = 200


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per all-reduce of one size, medians of rounds; a time is the slowest rank's."""

    nbytes: int
    library_s: float
    wfbp_s: float


def run(sizes: Sequence[int], rounds: int) -> list[Timing]:
    """Time float32 all-reduces; collective. Raises ``RuntimeError`` if a result is wrong."""
    world = MPI.COMM_WORLD.Dup()
    backend = MpiBackend()
    waiter = Waiter.watching(backend)
    timings = []
    for nbytes in sizes:
        data = np.empty(nbytes // 4, np.float32)

        def library(data: np.ndarray = data) -> None:
            world.Allreduce(MPI.IN_PLACE, data)

        def ours(data: np.ndarray = data) -> None:
            wait(backend.all_reduce(data, "float32", Op.SUM), waiter)

        ways = (library, ours)
        for way in ways:
            data.fill(world.rank + 1)
            way()
            if not (data == world.size * (world.size + 1) / 2).all():
                raise RuntimeError(f"an all-reduce of {nbytes} bytes has a wrong sum")
        repeats = max(1, min(MOST_REPEATS, BUDGET_BYTES // nbytes // 8))
        times_s: dict[Callable[[], None], list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in ways if number % 2 else ways[::-1]:
                data.fill(0)
                times_s[way].append(_seconds(world, way, repeats))
        medians = [statistics.median(times_s[way]) for way in ways]
        timings.append(Timing(nbytes, *medians))
    backend.close()
    world.Free()
    return timings


def _seconds(world: MPI.Intracomm, act: Callable[[], None], repeats: int) -> float:
    world.Barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        act()
    took_s: float = world.allreduce(time.perf_counter() - start, MPI.MAX)
    return took_s / repeats

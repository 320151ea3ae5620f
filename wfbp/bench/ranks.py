"""Runs on each rank of a comparison; times all-reduces by wfbp and by the MPI library."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

import numpy as np
from mpi4py import MPI

from wfbp.comm.mpi.backend import MpiBackend
from wfbp.comm.waiting import Waiter, wait
from wfbp.core.types import Op
from wfbp.runtime.runtime import FORWARDING_S

BUDGET_BYTES = 64 << 20
"""A block of small messages has about so many bytes."""
MOST_REPEATS = 200


def run_or_abort(act: Callable[[], Any]) -> Any:
    """Call a function; its result on rank 0, None elsewhere; if one rank fails, all exit."""
    try:
        result = act()
    except Exception as error:
        message = f"wfbp bench: error: rank {MPI.COMM_WORLD.rank}: {error}"
        print(message, file=sys.stderr, flush=True)
        time.sleep(FORWARDING_S)
        MPI.COMM_WORLD.Abort(1)
        raise
    return result if MPI.COMM_WORLD.rank == 0 else None


def need_several() -> None:
    """Refuse a single rank at once: it has no rank to communicate with."""
    if MPI.COMM_WORLD.size == 1:
        raise ValueError(
            "a benchmark needs at least two ranks; start it as: mpirun -np N wfbp bench ..."
        )


def say(text: str) -> None:
    if MPI.COMM_WORLD.rank == 0:
        print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Command, ranks, machine and versions, which affect the results."""
    versions = {}
    for package in ("wfbp", "torch", "numpy", "mpi4py"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": sys.argv[1:],
        "ranks": MPI.COMM_WORLD.size,
        "mpi": MPI.Get_library_version().split("\n")[0].strip(" \0"),
        "machine": platform.platform(),
        "versions": versions,
    }


def all_reduces(sizes: Sequence[int], rounds: int) -> list[tuple[int, float, float]]:
    """Bytes, and seconds of a float32 all-reduce by the MPI library and by wfbp; collective.

    Both take turns. A time is the median of rounds, and in each that of the slowest rank. Raises
    ``RuntimeError`` if a sum is wrong.
    """
    world = MPI.COMM_WORLD.Dup()
    backend = MpiBackend()
    waiter = Waiter.watching(backend)

    def library(data: np.ndarray) -> None:
        world.Allreduce(MPI.IN_PLACE, data)

    def ours(data: np.ndarray) -> None:
        wait(backend.all_reduce(data, "float32", Op.SUM), waiter)

    ways = (library, ours)
    timings = []
    for nbytes in sizes:
        data = np.empty(nbytes // 4, np.float32)
        for way in ways:
            data.fill(world.rank + 1)
            way(data)
            if not (data == world.size * (world.size + 1) / 2).all():
                raise RuntimeError(f"an all-reduce of {nbytes} bytes has a wrong sum")
        repeats = max(1, min(MOST_REPEATS, BUDGET_BYTES // nbytes // 8))
        times_s: dict[Callable[..., None], list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in ways if number % 2 else ways[::-1]:
                data.fill(0)
                world.Barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    way(data)
                took_s = world.allreduce(time.perf_counter() - start, MPI.MAX)
                times_s[way].append(took_s / repeats)
        timings.append(
            (nbytes, statistics.median(times_s[library]), statistics.median(times_s[ours]))
        )
    backend.close()
    world.Free()
    return timings

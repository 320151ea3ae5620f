"""Ranks time several ways to do the same: one block of calls of each in a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from mpi4py import MPI

BLOCK_S = 0.25

Step = Callable[[], object]


def in_turns(
    steps: Mapping[str, Step], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds per call on the slowest rank, and mean CPU seconds of a rank, in each round."""
    repeats = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        repeats[name] = max(2, min(200, int(BLOCK_S / _block(step, 2)[0])))
    walls: dict[str, list[float]] = {name: [] for name in steps}
    cpus: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            wall_s, cpu_s = _block(steps[name], repeats[name])
            walls[name].append(wall_s)
            cpus[name].append(cpu_s)
    return walls, cpus


def _block(step: Step, repeats: int) -> tuple[float, float]:
    world = MPI.COMM_WORLD
    world.Barrier()
    begin_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        step()
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    wall_s = world.allreduce(wall_s, MPI.MAX)
    return wall_s / repeats, world.allreduce(cpu_s) / world.size / repeats

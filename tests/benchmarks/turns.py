"""Times several ways to do the same in turns, so that foreign load meets them all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

BLOCK_S = 0.25

Step = Callable[[], object]


class Timing(NamedTuple):
    """Of several rounds; ``spread`` is between the first and the third quartile."""

    median: float
    least: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Timing:
        first, median, third = statistics.quantiles(values, n=4)
        return cls(median, min(values), third - first)


def seconds(way: Step, calls: int) -> float:
    """Seconds per call."""
    start_s = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - start_s) / calls


def samples(
    ways: Mapping[str, Step],
    rounds: int,
    round_s: float = 1e-3,
    timed: Callable[[Step, int], float] = seconds,
) -> dict[str, list[float]]:
    """Seconds per call of every way in every round, which has one way run for about so long."""
    calls = {}
    for name, way in ways.items():
        way()
        calls[name] = max(1, round(round_s / timed(way, 3)))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(timed(way, calls[name]))
    return found


def ratio(times: Mapping[str, Sequence[float]], name: str, other: str) -> float:
    """A way's time over another's, median of the rounds' ratios."""
    pairs = zip(times[name], times[other], strict=True)
    return statistics.median(mine / its for mine, its in pairs)


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
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Barrier()
    cpu_s = time.process_time()
    wall_s = world.allreduce(seconds(step, repeats), MPI.MAX)
    return wall_s, world.allreduce(time.process_time() - cpu_s) / world.size / repeats

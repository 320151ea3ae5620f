"""Slow, independent answers that the planners are compared with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from wfbp.core.cost import CostModel, LinearCost, PiecewiseCost
from wfbp.core.plan import Plan
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec


def all_partitions(num_tensors: int) -> Iterator[tuple[int, ...]]:
    """The ends of the runs of every partition of 1..num_tensors."""
    inner = range(1, num_tensors)
    for size in range(num_tensors):
        for cut in combinations(inner, size):
            yield (*cut, num_tensors)


def finishes(
    ready: Sequence[float], sizes: Sequence[int], cost: CostModel, kappa: float
) -> tuple[np.ndarray, np.ndarray]:
    """Finish (wall clock) and number of runs of every partition, all at once.

    Partition p cuts after gradient k + 1 where bit k of p is set.
    """
    num_tensors = len(sizes)
    partitions = np.arange(2 ** (num_tensors - 1))
    prefix = np.concatenate([[0], np.cumsum(sizes)])
    start = np.zeros(len(partitions), dtype=int)
    now = np.zeros(len(partitions))
    busy = np.zeros(len(partitions))
    runs = np.zeros(len(partitions), dtype=int)
    for j in range(1, num_tensors + 1):
        cut = (partitions >> (j - 1)) & 1 == 1 if j < num_tensors else partitions >= 0
        seconds = cost.many((prefix[j] - prefix[start]).astype(float))
        # Backward reaches r_j once it has run r_j seconds net of its slow-down while busy.
        ready_at = ready[j - 1] + kappa / (1 + kappa) * busy
        now = np.where(cut, np.maximum(now, ready_at) + seconds, now)
        busy = np.where(cut, busy + seconds, busy)
        runs += cut
        start = np.where(cut, j, start)
    return now, runs


def random_cost(rng: random.Random, linear: bool) -> CostModel:
    """Costs that matter against times of about a second and sizes up to 1000 bytes."""
    if linear:
        alpha = rng.choice([0.0, rng.random() * 0.1, rng.random() * 2])
        return LinearCost(alpha, rng.choice([0.0, rng.random() * 1e-3, rng.random() * 1e-2]))
    sizes = sorted(rng.sample(range(1, 6000), rng.randint(2, 7)))
    seconds = sorted(rng.random() ** 2 * rng.choice([1, 3]) for _ in sizes)
    if rng.random() < 0.3:  # a plateau and a jump
        seconds[1] = seconds[0]
    return PiecewiseCost(tuple(zip(map(float, sizes), seconds, strict=True)))


def random_trace(rng: random.Random, num_tensors: int, dtypes: Sequence[str] = ("uint8",)) -> Trace:
    """Sizes with many repeats and zeros, times with ties: the cases that break planners."""
    rows = []
    for k in range(num_tensors):
        spec = TensorSpec(
            f"t{k}",
            (rng.choice([0, 1, 10, rng.randint(0, 100), rng.randint(0, 1000)]),),
            rng.choice(dtypes),
        )
        backward_s = rng.choice([0.0, 0.1, rng.random(), rng.random() * 0.1])
        rows.append(TraceTensor(spec, rng.random() * 0.3, backward_s))
    return Trace("random", tuple(rows), other_s=rng.choice([0.0, 0.25]))


def random_kappa(rng: random.Random) -> float:
    """No interference half of the time, otherwise up to 1.5."""
    return rng.choice([0.0, rng.random() * 1.5])


def ends_of(plan: Plan) -> tuple[int, ...]:
    """Ends of the runs of a plan in backward order."""
    ends = []
    held = 0
    for group in plan.groups:
        held += len(group.tensors)
        ends.append(held)
    return tuple(ends)


def fixed_s(trace: Trace) -> float:
    """What an iteration takes beside backward and its communication."""
    return sum(t.forward_s for t in trace.tensors) + trace.other_s

"""The best partition of a row: the earliest finish, and the fewest runs for almost that finish."""

from __future__ import annotations

import heapq

from wfbp.core.cost import LinearCost
from wfbp.core.planners.curve_solver import CurveSolver
from wfbp.core.planners.linear_solver import LinearSolver
from wfbp.core.planners.partition import Partition, Row

Solver = LinearSolver | CurveSolver
"""Exact for one row: partitions of least makespan, least busy time, fewest runs."""

TOLERANCE = 1e-3  # an iteration may be so much longer than the optimum if that saves groups
PRECISION = 1e-10  # relative, of the optimum with interference, which is searched for
ROUNDING = 1e-12


def solver_of(row: Row, kappa: float) -> Solver:
    """The fastest solver that is exact for this row."""
    linear = all(isinstance(cost, LinearCost) for _, cost in row.segments)
    if linear and len(set(row.dtypes)) == 1:
        return LinearSolver(row, kappa)
    return CurveSolver(row, kappa)


def finish_s(partition: Partition, lag: float) -> float:
    """Wall seconds from the start of the phase until all ranks have everything."""
    return partition.makespan + lag * partition.busy


def optimum(solver: Solver, lag: float, fixed_s: float) -> Partition:
    """The partition of least makespan + ``lag`` * busy time, ``lag`` = kappa / (1 + kappa).

    With interference: let b(v) be the least busy time of makespans up to v, a falling step
    function. Every partition with makespan in (low, high] finishes at low + lag * b(high) or later,
    which drives a branch and bound. Its precision is relative to the iteration, whose other part is
    ``fixed_s``.
    """
    best = solver.fastest()
    if lag == 0.0:
        return best
    loosest = solver.cheapest(float("inf"))
    assert loosest is not None, "without a deadline every partition is allowed"
    low = best.makespan
    # A floor under the makespan may leave room for a cheaper partition that is as fast.
    as_fast = solver.cheapest(low * (1.0 + ROUNDING)) or best
    best = min(best, as_fast, loosest, key=lambda p: finish_s(p, lag))
    intervals = [(low + lag * loosest.busy, low, loosest.makespan, loosest.busy)]
    while intervals:
        bound, low, high, busy = heapq.heappop(intervals)
        slack = PRECISION * (fixed_s + finish_s(best, lag))
        if bound >= finish_s(best, lag) - slack:
            break
        for makespan in ((low + high) / 2, high - slack):
            if not low < makespan < high:
                continue
            partition = solver.cheapest(makespan)
            if partition is None:
                low = makespan
                continue
            best = min(best, partition, key=lambda p: finish_s(p, lag))
            # Between its makespan and the one asked for, no other is cheaper.
            heapq.heappush(intervals, (makespan + lag * busy, makespan, high, busy))
            high, busy = partition.makespan, partition.busy
        heapq.heappush(intervals, (low + lag * busy, low, high, busy))
    return best


def fewest(
    solver: Solver, lag: float, best: Partition, spare_s: float, iteration_s: float
) -> Partition:
    """The fewest runs that finish within ``spare_s`` after ``best``; of those the fastest."""
    low = finish_s(best, lag)
    rounding_s = ROUNDING * iteration_s  # or an optimum of fewer groups might be missed
    chosen = _fewest_by(solver, lag, low + spare_s + rounding_s, best)
    while finish_s(chosen, lag) - low > 1e-3 * spare_s + rounding_s:  # bisection
        middle = (low + finish_s(chosen, lag)) / 2
        partition = _fewest_by(solver, lag, middle, chosen)
        if len(partition.ends) <= len(chosen.ends) and finish_s(partition, lag) <= middle:
            chosen = partition
        else:
            low = middle
    return chosen


def _fewest_by(solver: Solver, lag: float, latest_s: float, best: Partition) -> Partition:
    """The partition of fewest runs that finishes by ``latest_s``; ``best`` if no other has fewer.

    The deadline for its makespan v is the fixed point of v = latest - lag * b(v) (:func:`optimum`).
    """
    makespan = latest_s
    at_most = len(best.ends)
    while lag > 0.0:
        cheapest = solver.cheapest(makespan)
        if cheapest is None:
            return best
        lower = latest_s - lag * cheapest.busy
        if lower >= makespan - ROUNDING * latest_s:
            break
        makespan = lower

    def accept(partition: Partition) -> bool:
        return finish_s(partition, lag) <= latest_s

    return solver.fewest(makespan, accept, at_most) or best

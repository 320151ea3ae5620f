"""OASR: the exact optimum of start-up sharing against overlap."""

from __future__ import annotations

import heapq

from wfbp.core.cost import Costs, LinearCost
from wfbp.core.plan import Plan
from wfbp.core.planners.oasr_curve import CurveSolver
from wfbp.core.planners.oasr_linear import LinearSolver
from wfbp.core.planners.partitions import Partition, Solver
from wfbp.core.planners.runs import plan_of_runs
from wfbp.core.trace import Trace

TOLERANCE = 1e-3
"""An iteration may be this much longer than the optimum if that takes fewer groups."""
PRECISION = 1e-10
"""With interference the optimum is searched for; it is found to this relative precision."""
AMONG_FEWEST = 1e-3
"""The fastest of the fewest groups is found to this part of the tolerance."""
ROUNDING = 1e-12


def oasr(trace: Trace, costs: Costs, *, tolerance: float = TOLERANCE) -> Plan:
    """The fewest groups whose iteration is within ``tolerance`` of the shortest possible.

    The shortest is exact over all partitions into runs of consecutive gradients: with P_j the
    bytes of the first j gradients of backward, c(m) the cost of a message,

        finish(j) = min over i < j of  max(finish(i), r_j) + c(P_j - P_i)

    and with interference kappa the least of makespan + kappa / (1 + kappa) * busy time (see
    ``partitions``), which for a linear cost is the programme over (j, number of groups). Fewer
    groups mean less interference and less work per step than the model knows of, so within the
    tolerance the fewest are taken, and among those the fastest.

    Exact for one element type, with one limit: for a measured curve with kappa > 0 the fewest
    groups are sought among the partitions that keep the channel busy for the shortest time for
    their number of groups; the plan returned is within the tolerance nevertheless. A run of
    several element types is planned as if it left as a whole; its messages may leave earlier,
    never later.

    Args:
        trace: sizes and compute times of one step.
        costs: ``all_reduce`` and ``kappa`` are looked at.
        tolerance: relative, of the iteration time; 0 asks for the optimum itself.

    Returns:
        A plan of schedule ``oasr``.

    Raises:
        ValueError: ``tolerance`` is negative or not a number.

    Source:
        Our exact formulation of the idea published by Song et al., "OASR-WFBP", JPDC 2025, of
        which only the abstract is public; docs/planning.md.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> trace = Trace("t", tuple(
        ...     TraceTensor(TensorSpec(n, (10,), "float32"), 1.0, 1.0) for n in "abcd"))
        >>> [g.tensors for g in oasr(trace, Costs(LinearCost(0.9, 0.01))).groups]
        [(3, 2), (1, 0)]
    """
    if not 0.0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance: expected a finite number of at least 0, found {tolerance!r}")
    ready_s, sizes = trace.ready_times_s, trace.backward_bytes
    dtypes = [t.spec.dtype for t in reversed(trace.tensors)]
    cost, kappa = costs.all_reduce, costs.kappa
    solver: Solver
    if isinstance(cost, LinearCost) and len(set(dtypes)) == 1:
        solver = LinearSolver(ready_s, sizes, cost, kappa)
    else:
        solver = CurveSolver(ready_s, sizes, dtypes, cost, kappa)
    lag = kappa / (1.0 + kappa)
    fixed_s = trace.forward_s + trace.other_s
    best = _optimum(solver, lag, fixed_s)
    optimum_s = fixed_s + _finish(best, lag)
    latest_s = optimum_s * (1.0 + tolerance + ROUNDING) - fixed_s
    chosen = _fewest(solver, lag, latest_s, best)
    precision_s = (AMONG_FEWEST * tolerance + ROUNDING) * optimum_s
    chosen = _fastest_of_as_few(solver, lag, _finish(best, lag), chosen, precision_s)
    return plan_of_runs("oasr", trace, chosen.ends)


def _finish(partition: Partition, lag: float) -> float:
    """Wall seconds from the start of backward until everything has arrived."""
    return partition.makespan + lag * partition.busy


def _optimum(solver: Solver, lag: float, fixed_s: float) -> Partition:
    """The partition of least finish.

    Without interference that is the fastest. With it, let b(v) be the least busy time of
    makespan at most v: a falling staircase, of which the solver gives any point. An interval
    (low, high] of makespans holds no finish under low + lag * b(high), so intervals are split,
    most promising first, until none can beat the best by more than the precision. Each answer
    moves to a corner of the staircase, and the step just below it is asked for too.
    """
    best = solver.fastest()
    if lag == 0.0:
        return best
    loosest = solver.cheapest(float("inf"))
    assert loosest is not None, "without a deadline every partition is allowed"
    low = best.makespan
    best = min(best, loosest, key=lambda p: _finish(p, lag))
    intervals = [(low + lag * loosest.busy, low, loosest.makespan, loosest.busy)]
    while intervals:
        bound, low, high, busy = heapq.heappop(intervals)
        slack = PRECISION * (fixed_s + _finish(best, lag))
        if bound >= _finish(best, lag) - slack:
            break
        for makespan in ((low + high) / 2, high - slack):
            if not low < makespan < high:
                continue
            found = solver.cheapest(makespan)
            if found is None:
                low = makespan
                continue
            best = min(best, found, key=lambda p: _finish(p, lag))
            # Between its makespan and the one asked for, no other is cheaper.
            heapq.heappush(intervals, (makespan + lag * busy, makespan, high, busy))
            high, busy = found.makespan, found.busy
        heapq.heappush(intervals, (low + lag * busy, low, high, busy))
    return best


def _fewest(solver: Solver, lag: float, latest_s: float, best: Partition) -> Partition:
    """The fewest runs that finish by ``latest_s``, or ``best`` where it has as few.

    All partitions in question have a makespan of at most v = latest. So they keep the channel
    busy for at least b(v), which leaves v = latest - lag * b(v) for the makespan, and so on down
    to the fixed point. For a linear cost b is known from the number of runs alone, hence the
    cheapest partition there is the one of fewest runs.
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
        return _finish(partition, lag) <= latest_s

    found = solver.fewest(makespan, accept, at_most)
    return best if found is None else found


def _fastest_of_as_few(
    solver: Solver, lag: float, low: float, chosen: Partition, precision_s: float
) -> Partition:
    """The partition of earliest finish with as many runs as ``chosen``, by bisection."""
    while _finish(chosen, lag) - low > precision_s:
        middle = (low + _finish(chosen, lag)) / 2
        found = _fewest(solver, lag, middle, chosen)
        if len(found.ends) <= len(chosen.ends) and _finish(found, lag) <= middle:
            chosen = found
        else:
            low = middle
    return chosen

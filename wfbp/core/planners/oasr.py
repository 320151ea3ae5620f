"""OASR: the exact optimum of start-up sharing against overlap."""

from __future__ import annotations

from functools import lru_cache

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.optimum import TOLERANCE, check_tolerance, optimum, solver_of, within
from wfbp.core.planners.plan_builder import plan_of_runs
from wfbp.core.planners.rows import Rows, all_by
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


@lru_cache(maxsize=4)  # hybrid asks again what a comparison of all planners has asked before
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
    check_tolerance(tolerance)
    modes = all_by(Operation.ALL_REDUCE, len(trace.tensors))
    solver = solver_of(Rows(trace, costs).backward(modes), costs.kappa)
    lag = costs.kappa / (1.0 + costs.kappa)
    fixed_s = trace.forward_s + trace.other_s
    best = optimum(solver, lag, fixed_s)
    return plan_of_runs("oasr", trace, within(solver, lag, fixed_s, best, tolerance).ends)

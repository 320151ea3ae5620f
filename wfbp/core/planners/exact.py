"""Exact planners: the optimum of start-up sharing against overlap.

OASR all-reduces everything in backward; ``independent`` decouples everything and cuts both phases
exactly.
"""

from __future__ import annotations

from functools import lru_cache

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.optimum import TOLERANCE, check_tolerance, optimum, solver_of, within
from wfbp.core.planners.partition import Rows, all_by, plan_of_phases, plan_of_runs
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
        >>> trace = Trace.uniform("abcd", 10, 1.0, 1.0)
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


@lru_cache(maxsize=4)  # hybrid asks again what a comparison of all planners has asked before
def independent(trace: Trace, costs: Costs, *, tolerance: float = TOLERANCE) -> Plan:
    """Every gradient reduce-scattered in backward and gathered in the next forward.

    Where the shards of a message lie tensor by tensor, the groups of one phase bind those of the
    other in nothing. So the two phases are two problems, and forward's is backward's in a mirror:
    with r' the forward compute from a tensor to the end,

        T = DP(r, c_RS) + DP(r', c_AG)

    where DP is the exact programme of OASR, with interference too. As there, each phase takes
    the fewest groups within half of the tolerance; ``tolerance=0`` asks for the optimum itself.

    Args:
        trace: sizes and compute times of one step.
        costs: of reduce-scatter and all-gather, and kappa.
        tolerance: relative, of the iteration time.

    Returns:
        A plan of schedule ``independent``.

    Raises:
        ValueError: ``tolerance`` is negative or not a number.

    Source:
        The decoupling is DeAR's: Zhang et al., "DeAR: Accelerating Distributed Deep Learning
        with Fine-Grained All-Reduce Pipelining", ICDCS 2023. The separate exact partitions are
        ours; docs/planning.md.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> trace = Trace.uniform("abcd", 10, 0.2, 1.0)
        >>> made = independent(trace, Costs(LinearCost(1.8, 0.01)))
        >>> [g.tensors for g in made.groups]
        [(3, 2), (1, 0), (0, 1, 2, 3)]
    """
    check_tolerance(tolerance)
    lag = costs.kappa / (1.0 + costs.kappa)
    modes = all_by(Operation.REDUCE_SCATTER, len(trace.tensors))
    rows = Rows(trace, costs)
    fixed_s = trace.forward_s + trace.backward_s + trace.other_s
    ends = []
    for row in (rows.backward(modes), rows.forward(range(rows.num_tensors))):
        solver = solver_of(row, costs.kappa)
        beside_s = fixed_s - row.floor_s
        best = optimum(solver, lag, beside_s)
        ends.append(within(solver, lag, beside_s, best, tolerance / 2).ends)
    return plan_of_phases("independent", trace, modes, *ends)

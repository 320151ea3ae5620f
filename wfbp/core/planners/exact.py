"""Exact planners: the best compromise between fewer start-ups and more overlap."""

from __future__ import annotations

from functools import lru_cache

from wfbp.core.checks import number
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.optimum import TOLERANCE, optimum, solver_of, within
from wfbp.core.planners.partition import Rows, all_by, plan_of_phases, plan_of_runs
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


@lru_cache(maxsize=4)  # hybrid asks again what a comparison of all planners has asked before
def oasr(trace: Trace, costs: Costs, *, tolerance: float = TOLERANCE) -> Plan:
    """All-reduce in backward: the fewest groups within relative ``tolerance`` of the optimum.

    Exact over partitions into runs of consecutive gradients, with interference too
    (planning.md). Limits: for a measured curve with kappa > 0, only the cheapest partition of
    each number of groups is considered. A run of several element types is planned as a whole; its
    messages may be sent earlier, never later. Source: our exact formulation of Song et al.,
    "OASR-WFBP", JPDC 2025.
    """
    number("tolerance", tolerance)
    modes = all_by(Operation.ALL_REDUCE, len(trace.tensors))
    solver = solver_of(Rows(trace, costs).backward(modes), costs.kappa)
    lag = costs.kappa / (1.0 + costs.kappa)
    fixed_s = trace.forward_s + trace.other_s
    best = optimum(solver, lag, fixed_s)
    return plan_of_runs("oasr", trace, within(solver, lag, fixed_s, best, tolerance).ends)


@lru_cache(maxsize=4)  # hybrid asks again what a comparison of all planners has asked before
def independent(trace: Trace, costs: Costs, *, tolerance: float = TOLERANCE) -> Plan:
    """Every gradient reduce-scattered in backward and gathered in the next forward; exact.

    Shards are stored tensor by tensor, so the phases are two independent problems. Each takes the
    fewest groups within half of the relative ``tolerance``. Source: the decoupling is DeAR's (Zhang
    et al., ICDCS 2023); the separate exact partitions are ours (docs/explanation/planning.md).
    """
    number("tolerance", tolerance)
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

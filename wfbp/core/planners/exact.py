"""Exact planners: the best compromise between fewer start-ups and more overlap."""

from __future__ import annotations

from functools import lru_cache

from wfbp.core.checks import number
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.optimum import TOLERANCE, fewest_within
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
    row = Rows(trace, costs).backward(all_by(Operation.ALL_REDUCE, len(trace.tensors)))
    fixed_s = trace.forward_s + trace.other_s
    return plan_of_runs("oasr", trace, fewest_within(row, costs.kappa, fixed_s, tolerance).ends)


@lru_cache(maxsize=4)  # hybrid asks again what a comparison of all planners has asked before
def independent(trace: Trace, costs: Costs, *, tolerance: float = TOLERANCE) -> Plan:
    """Every gradient reduce-scattered in backward and gathered in the next forward; exact.

    Shards are stored tensor by tensor, so the phases are two independent problems. Each takes the
    fewest groups within half of the relative ``tolerance``. Source: the decoupling is DeAR's (Zhang
    et al., ICDCS 2023); the separate exact partitions are ours (docs/explanation/planning.md).
    """
    number("tolerance", tolerance)
    modes = all_by(Operation.REDUCE_SCATTER, len(trace.tensors))
    rows = Rows(trace, costs)
    fixed_s = trace.forward_s + trace.backward_s + trace.other_s
    ends = [
        fewest_within(row, costs.kappa, fixed_s - row.floor_s, tolerance / 2).ends
        for row in (rows.backward(modes), rows.forward(range(len(trace.tensors))))
    ]
    return plan_of_phases("independent", trace, modes, *ends)

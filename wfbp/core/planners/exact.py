"""Exact planners: the best compromise between fewer start-ups and more overlap."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

from wfbp.core.checks import number
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.optimum import TOLERANCE, fewest, finish_s, optimum, solver_of
from wfbp.core.planners.partition import Modes, all_by, plan_of_phases, rows_of
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


@lru_cache(maxsize=4)  # hybrid asks again what a comparison of all planners has asked before
def oasr(trace: Trace, costs: Costs, *, tolerance: float = TOLERANCE) -> Plan:
    """All-reduce in backward: the fewest groups within relative ``tolerance`` of the optimum.

    Exact over partitions into runs of consecutive gradients (planning.md), except for a measured
    curve with interference (kappa > 0), where only the cheapest partition of each number of
    groups is considered. For n tensors of one type, the shortest iteration is found in O(n) with
    linear costs, else in O(n^2); the fewest groups k in up to O(k n^2). Interference repeats this.
    A run of several element types is planned as a whole; its messages may be sent earlier, never
    later. Source: our exact formulation of Song et al., "OASR-WFBP", JPDC 2025.
    """
    modes = all_by(Operation.ALL_REDUCE, len(trace.tensors))
    return exact_plan("oasr", trace, costs, modes, tolerance)[0]


@lru_cache(maxsize=4)  # hybrid asks again what a comparison of all planners has asked before
def independent(trace: Trace, costs: Costs, *, tolerance: float = TOLERANCE) -> Plan:
    """Every gradient reduce-scattered in backward and gathered in the next forward; exact.

    Shards are stored tensor by tensor, so the phases are two independent problems. Each takes the
    fewest groups within half of the relative ``tolerance``. Source: the decoupling is DeAR's (Zhang
    et al., ICDCS 2023); the separate exact partitions are ours (docs/explanation/planning.md).
    """
    modes = all_by(Operation.REDUCE_SCATTER, len(trace.tensors))
    return exact_plan("independent", trace, costs, modes, tolerance)[0]


def exact_plan(
    schedule: str,
    trace: Trace,
    costs: Costs,
    modes: Modes,
    tolerance: float,
    latest_s: float = float("inf"),
) -> tuple[Plan, float]:
    """The fewest groups for these modes, and the seconds of the shortest iteration for them.

    Both phases are cut exactly, and share the spare time equally: the relative ``tolerance``, or
    the time until ``latest_s`` if that is shorter.
    """
    number("tolerance", tolerance)
    # Neighbours of one operation become one segment, whose runs may be longer.
    modes = tuple([*same][-1] for _, same in groupby(modes, key=lambda mode: mode[1]))
    rows = rows_of(trace, costs, modes)
    lag = costs.kappa / (1.0 + costs.kappa)
    solvers = [solver_of(row, costs.kappa) for row in rows]
    compute_s = trace.forward_s + trace.backward_s + trace.other_s
    best = [
        optimum(solver, lag, compute_s - row.floor_s)
        for solver, row in zip(solvers, rows, strict=True)
    ]
    exposed_s = (finish_s(b, lag) - row.floor_s for b, row in zip(best, rows, strict=True))
    shortest_s = compute_s + sum(exposed_s)
    spare_s = max(0.0, min(tolerance * shortest_s, latest_s - shortest_s)) / len(rows)
    ends = [
        fewest(solver, lag, b, spare_s, shortest_s).ends
        for solver, b in zip(solvers, best, strict=True)
    ]
    return plan_of_phases(schedule, trace, modes, *ends), shortest_s

"""Independent partitions: reduce-scatter in backward, all-gather in forward, each cut exactly."""

from __future__ import annotations

from functools import lru_cache

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.optimum import TOLERANCE, check_tolerance, optimum, solver_of, within
from wfbp.core.planners.plan_builder import plan_of_phases
from wfbp.core.planners.rows import Rows, all_by
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


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
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> trace = Trace("t", tuple(
        ...     TraceTensor(TensorSpec(n, (10,), "float32"), 0.2, 1.0) for n in "abcd"))
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

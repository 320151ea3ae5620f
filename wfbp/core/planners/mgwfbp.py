"""MG-WFBP: merge a gradient into the next where that hides or saves a start-up."""

from __future__ import annotations

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.plan_builder import plan_of_runs
from wfbp.core.trace import Trace


def mgwfbp(trace: Trace, costs: Costs) -> Plan:
    """The published merging rule, decided once per pair of neighbours in backward order.

    With the message that holds tensor k starting at s_k and ending at e_k = s_k + c(its bytes),
    it takes tensor k+1 in if that is ready before the message ends, and either the message is
    still waiting for the channel then, or holding it back costs less than a start-up:

        r_{k+1} < e_k   and   (s_k > r_{k+1}   or   r_{k+1} - s_k < alpha)

    The rule looks at one neighbour at a time, so it is not optimal (docs/planning.md). For a
    measured curve alpha is the cost of 0 bytes. Interference is not part of the rule.

    Args:
        trace: sizes and compute times of one step.
        costs: ``all_reduce`` is looked at.

    Returns:
        A plan of schedule ``mgwfbp``.

    Source:
        Shi, Chu, Li, "MG-WFBP: Merging Gradients Wisely for Efficient Communication in
        Distributed Deep Learning", IEEE TPDS 2021, algorithm 1.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> trace = Trace("t", tuple(
        ...     TraceTensor(TensorSpec(n, (10,), "float32"), 1.0, 1.0) for n in "abc"))
        >>> [len(mgwfbp(trace, Costs(LinearCost(alpha, 0.0))).groups) for alpha in (0.9, 1.1)]
        [3, 1]
    """
    cost = costs.all_reduce
    alpha = cost(0)
    ready = trace.ready_times_s
    sizes = trace.backward_bytes
    ends = []
    free = 0.0
    held = sizes[0]
    for k in range(1, len(sizes)):
        start = max(free, ready[k - 1])
        end = start + cost(held)
        if ready[k] < end and (start > ready[k] or ready[k] - start < alpha):
            held += sizes[k]
        else:
            ends.append(k)
            free, held = end, sizes[k]
    ends.append(len(sizes))
    return plan_of_runs("mgwfbp", trace, ends)

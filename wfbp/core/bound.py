"""The limit that no schedule on one in-order channel can beat."""

from __future__ import annotations

from itertools import product

import numpy as np

from wfbp.core.cost import Costs, Line
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


def ratio_to_lower_bound(iteration_s: float, bound_s: float) -> float:
    """T/LB: 1.0 if nothing is left to gain; infinite if only the bound is zero."""
    if bound_s == 0.0:
        return 1.0 if iteration_s == 0.0 else float("inf")
    return iteration_s / bound_s


def lower_bound_s(trace: Trace, costs: Costs) -> float:
    """The least seconds per iteration that any schedule needs on one in-order channel.

    Between the gradient of tensor i and its next use, all bytes of the tensors up to i (forward
    order) cross the channel. The rest of the iteration runs forward from i to the end and backward
    to i. If no message is cheaper than a + b * bytes,

        LB = max(T_f + T_b, max_i { sum_{k>=i} (tf_k + tb_k) + a + b * sum_{j<=i} m_j }) + other

    For a measured curve each i uses the best line under the curve. The cheaper of all-reduce and
    reduce-scatter with all-gather counts, and kappa is ignored, because interference only adds
    time. Source: written for this project; planning.md.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> trace = Trace.uniform("w", 250, 1.0, 2.0)
        >>> lower_bound_s(trace, Costs(LinearCost(0.5, 0.001)))
        4.5
    """
    sizes = np.array([t.spec.nbytes for t in trace.tensors], dtype=np.float64)
    compute = np.array([t.forward_s + t.backward_s for t in trace.tensors])
    bytes_up_to = np.cumsum(sizes)
    compute_from = np.cumsum(compute[::-1])[::-1]
    limit = float(compute_from[0])
    for alpha, beta in _lines(costs, float(bytes_up_to[-1])):
        limit = max(limit, float(np.max(compute_from + (alpha + beta * bytes_up_to))))
    return limit + trace.other_s


def _lines(costs: Costs, max_bytes: float) -> list[Line]:
    """Lines below the cost of moving bytes by all-reduce, by both halves, or by a mixture."""
    whole = costs.all_reduce.lines_below(max_bytes)
    if costs.reduce_scatter is None and costs.all_gather is None:
        return list(whole)
    scatter = costs.of(Operation.REDUCE_SCATTER).lines_below(max_bytes)
    gather = costs.of(Operation.ALL_GATHER).lines_below(max_bytes)
    return [
        (min(a, a_rs + a_ag), min(b, b_rs + b_ag))
        for (a, b), (a_rs, b_rs), (a_ag, b_ag) in product(whole, scatter, gather)
    ]

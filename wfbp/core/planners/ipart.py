"""iPart: greedy partitions of various sizes, each hidden under the compute of its neighbour."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from wfbp.core.cost import CostModel, Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.partitions import Row, measure
from wfbp.core.planners.plan_builder import plan_of_phases
from wfbp.core.planners.rows import Rows, all_by
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


def ipart(trace: Trace, costs: Costs) -> Plan:
    """Pull: the next partition is the largest whose transfer fits under the current one's compute.

    Partitions of the pull follow each other in forward order: while the layers of one compute,
    the next one travels. The push mirrors it: seen from the end of backward, while the layers of
    one partition compute, the one sent before travels. Where not even one tensor fits, one is
    taken. The rule does not say how large the exposed partition at the border is; 1, 2, 4, ...
    tensors are tried in each phase, and the size that ends earliest is taken.

    Args:
        trace: sizes and compute times of one step.
        costs: of reduce-scatter (push) and all-gather (pull), and kappa.

    Returns:
        A plan of schedule ``ipart``.

    Source:
        Wang et al., "Overlapping Communication With Computation in Parameter Server for Scalable
        DL Training", IEEE TPDS 2021, with a server on every node.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> trace = Trace("t", tuple(
        ...     TraceTensor(TensorSpec(n, (10,), "float32"), 1.0, 2.0) for n in "abcdefg"))
        >>> made = ipart(trace, Costs(LinearCost(0.0, 0.025)))
        >>> [len(g.tensors) for g in made.groups]
        [2, 4, 1, 1, 2, 4]
    """
    rows = Rows(trace, costs)
    modes = all_by(Operation.REDUCE_SCATTER, rows.num_tensors)
    push = rows.backward(modes)
    pull = rows.forward(range(rows.num_tensors))
    push_ends = _best_ends(push, [t.backward_s for t in trace.tensors], costs.kappa)
    pull_ends = _best_ends(pull, [t.forward_s for t in trace.tensors], costs.kappa)
    return plan_of_phases("ipart", trace, modes, push_ends, pull_ends)


def _best_ends(row: Row, compute_s: Sequence[float], kappa: float) -> list[int]:
    """Ends in backward order of the best greedy partition of one phase."""
    num_tensors = len(compute_s)
    sent = list(accumulate(reversed(row.sizes), initial=0))
    computed = list(accumulate(compute_s, initial=0.0))
    cost = row.segments[0][1]
    found = []
    first = 1
    while True:
        first = min(first, num_tensors)
        starts = _greedy(first, sent, computed, cost)
        ends = [num_tensors - start for start in reversed(starts)]
        partition = measure(row, ends, kappa)
        lag = kappa / (1.0 + kappa)
        found.append((partition.makespan + lag * partition.busy, len(ends), ends))
        if first == num_tensors:
            return min(found)[2]
        first *= 2


def _greedy(
    first: int, sent: Sequence[int], computed: Sequence[float], cost: CostModel
) -> list[int]:
    """Starts of the partitions in forward order, the exposed one of ``first`` tensors."""
    starts = [0]
    start, end, last = 0, first, len(sent) - 1
    while end < last:
        starts.append(end)
        hidden_s = computed[end] - computed[start]
        fits = bisect_right(
            range(last + 1), hidden_s, end + 1, key=lambda to: cost(sent[to] - sent[end])
        )
        start, end = end, max(fits - 1, end + 1)
    return starts

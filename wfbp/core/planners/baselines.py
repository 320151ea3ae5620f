"""Planners that every other one is compared with: published rules and plain extremes.

WFBP (every tensor alone), a single message, groups closed by size, MG-WFBP's merging rule,
parameter servers, and iPart's greedy partitions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from wfbp.core.cost import CostModel, Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.partition import Row, Rows, all_by, measure, plan_of_phases, plan_of_runs
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


def per_tensor(trace: Trace, costs: Costs) -> Plan:
    """One message per tensor: the most overlap, and the most start-ups. Only sizes are looked at.

    Source:
        Wait-free backpropagation: Zhang et al., "Poseidon", USENIX ATC 2017.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> trace = Trace.uniform("wb", 1, 1.0, 1.0)
        >>> len(per_tensor(trace, Costs(LinearCost(1e-3, 1e-9))).groups)
        2
    """
    return plan_of_runs("wfbp", trace, range(1, len(trace.tensors) + 1))


def single(trace: Trace, costs: Costs) -> Plan:
    """All tensors in one message (per element type): one start-up, no overlap.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> trace = Trace.uniform("wb", 1, 1.0, 1.0)
        >>> [g.tensors for g in single(trace, Costs(LinearCost(1e-3, 1e-9))).groups]
        [(1, 0)]
    """
    return plan_of_runs("single", trace, [len(trace.tensors)])


DEFAULT_BYTES = 25 * 2**20


def threshold(trace: Trace, costs: Costs, *, threshold_bytes: int = DEFAULT_BYTES) -> Plan:
    """Fill a group in backward order and close it once it holds ``threshold_bytes`` or more.

    The tensor that reaches the threshold stays in its group, so a group may exceed the threshold
    by less than its last tensor; the last group may be smaller.

    Args:
        trace: sizes and compute times of one step; only sizes are looked at.
        costs: not looked at.
        threshold_bytes: at least 1; default 25 MiB, which is PyTorch DDP's bucket size.

    Returns:
        A plan of schedule ``threshold``.

    Raises:
        ValueError: ``threshold_bytes`` is under 1.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> trace = Trace.uniform("abc", 10, 1.0, 1.0)
        >>> costs = Costs(LinearCost(1e-3, 1e-9))
        >>> [g.tensors for g in threshold(trace, costs, threshold_bytes=41).groups]
        [(2, 1), (0,)]
    """
    return plan_of_runs("threshold", trace, ends_by_size(trace.backward_bytes, threshold_bytes))


def ends_by_size(sizes: Sequence[int], threshold_bytes: int) -> list[int]:
    """Ends of the groups that are closed once they hold ``threshold_bytes`` or more, at least 1."""
    if not threshold_bytes >= 1:
        raise ValueError(f"threshold_bytes: expected at least 1, found {threshold_bytes!r}")
    ends = []
    held = 0
    for k, nbytes in enumerate(sizes, start=1):
        held += nbytes
        if held >= threshold_bytes or k == len(sizes):
            ends.append(k)
            held = 0
    return ends


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
        >>> trace = Trace.uniform("abc", 10, 1.0, 1.0)
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


def parameter_server(trace: Trace, costs: Costs) -> Plan:
    """Push the whole model after backward, pull the whole model before forward: no overlap.

    Every node serves 1/P of each tensor, so that a push is a reduce-scatter and a pull is an
    all-gather. It is the baseline of iPart and no more.

    Source:
        Baseline of iPart (Wang et al., IEEE TPDS 2021).

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> trace = Trace.uniform("wb", 1, 1.0, 1.0)
        >>> made = parameter_server(trace, Costs(LinearCost(1e-3, 1e-9)))
        >>> [g.tensors for g in made.groups]
        [(1, 0), (0, 1)]
    """
    num_tensors = len(trace.tensors)
    modes = all_by(Operation.REDUCE_SCATTER, num_tensors)
    return plan_of_phases("ps", trace, modes, [num_tensors], [num_tensors])


def parameter_server_layerwise(trace: Trace, costs: Costs) -> Plan:
    """Push and pull every tensor alone, under the compute of the others.

    Source:
        Baseline of iPart (Wang et al., IEEE TPDS 2021); the push is Poseidon's.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> trace = Trace.uniform("wb", 1, 1.0, 1.0)
        >>> made = parameter_server_layerwise(trace, Costs(LinearCost(1e-3, 1e-9)))
        >>> [g.tensors for g in made.groups]
        [(1,), (0,), (0,), (1,)]
    """
    num_tensors = len(trace.tensors)
    modes = all_by(Operation.REDUCE_SCATTER, num_tensors)
    ends = range(1, num_tensors + 1)
    return plan_of_phases("ps_layerwise", trace, modes, ends, ends)


def ipart(trace: Trace, costs: Costs) -> Plan:
    """Pull: the next partition is the largest whose transfer fits under the current one's compute.

    Partitions of the pull follow each other in forward order: while the layers of one compute,
    the next one travels. The push mirrors it: seen from the end of backward, while the layers of
    one partition compute, the one sent before travels. Where not even one tensor fits, one is
    taken. The rule does not say how large the exposed partition between the phases is; 1, 2, 4, ...
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
        >>> trace = Trace.uniform("abcdefg", 10, 1.0, 2.0)
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
    candidates = []
    first = 1
    while True:
        first = min(first, num_tensors)
        starts = _greedy(first, sent, computed, cost)
        ends = [num_tensors - start for start in reversed(starts)]
        partition = measure(row, ends, kappa)
        lag = kappa / (1.0 + kappa)
        candidates.append((partition.makespan + lag * partition.busy, len(ends), ends))
        if first == num_tensors:
            return min(candidates)[2]
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

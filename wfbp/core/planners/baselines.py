"""Planners for comparison: published rules and plain extremes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from wfbp.core.cost import CostModel, Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.partition import (
    Row,
    all_by,
    measure,
    plan_of_halves,
    plan_of_phases,
    plan_of_runs,
    rows_of,
)
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


def per_tensor(trace: Trace, costs: Costs) -> Plan:
    """One message per tensor (wait-free backpropagation, "Poseidon", USENIX ATC 2017)."""
    return plan_of_runs("layerwise", trace, range(1, len(trace.tensors) + 1))


def single(trace: Trace, costs: Costs) -> Plan:
    """All tensors in one message (per element type): one start-up, no overlap."""
    return plan_of_runs("single", trace, [len(trace.tensors)])


DEFAULT_BYTES = 25 * 2**20


def threshold(trace: Trace, costs: Costs, *, threshold_bytes: int = DEFAULT_BYTES) -> Plan:
    """Close each group, in backward order, once it holds ``threshold_bytes`` or more."""
    return plan_of_runs("threshold", trace, ends_by_size(trace.backward_bytes, threshold_bytes))


def ends_by_size(sizes: Sequence[int], threshold_bytes: int) -> list[int]:
    """Ends of groups that close once they hold ``threshold_bytes`` or more."""
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
    """MG-WFBP's rule, which decides once per pair of neighbours and is not optimal.

    The message that holds tensor k starts at s_k and ends at e_k. It takes in tensor k+1 if
    ``r_{k+1} < e_k and (s_k > r_{k+1} or r_{k+1} - s_k < alpha)``. Then the message still waits for
    the channel, or its delay costs less than a start-up (for a curve: the cost of 0 bytes). Source:
    Shi, Chu, Li, "MG-WFBP", IEEE TPDS 2021, algorithm 1.
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
    """Push the whole model after backward, pull it before forward: iPart's baseline, no overlap."""
    return plan_of_halves("ps", trace, [len(trace.tensors)])


def parameter_server_layerwise(trace: Trace, costs: Costs) -> Plan:
    """Push and pull every tensor alone, during the compute of the others: iPart's baseline."""
    return plan_of_halves("ps_layerwise", trace, range(1, len(trace.tensors) + 1))


def dear(trace: Trace, costs: Costs, *, threshold_bytes: int = DEFAULT_BYTES) -> Plan:
    """One byte threshold for both phases: what is scattered together is gathered together.

    Published DeAR (Zhang et al., ICDCS 2023, section IV) issues an all-gather after the previous
    one, when forward reaches its layers. Here all are queued when forward starts, which is never
    later.
    """
    return plan_of_halves("dear", trace, ends_by_size(trace.backward_bytes, threshold_bytes))


def ipart(trace: Trace, costs: Costs) -> Plan:
    """iPart's greedy partitions, with a server on every node (Wang et al., IEEE TPDS 2021).

    Pull: the next partition is the largest (at least one tensor) whose transfer fits under the
    compute of the current one. Push mirrors this from the end of backward. The rule does not fix
    the size of the exposed partition between the phases: each phase tries 1, 2, 4, ... tensors.
    """
    modes = all_by(Operation.REDUCE_SCATTER, len(trace.tensors))
    push, pull = rows_of(trace, costs, modes)
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
    """Starts of the partitions in forward order; the exposed one has ``first`` tensors."""
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

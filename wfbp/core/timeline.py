"""Predicts one steady iteration under a plan, exactly, from a trace and costs.

In each phase groups are sent in order, each when it is ready and the channel is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from wfbp.core.bound import lower_bound_s, ratio_to_lower_bound
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.ranks import counted
from wfbp.core.trace import Trace
from wfbp.core.types import Operation, Phase

__all__ = ["GroupTiming", "IterationForecast", "iteration_by_kappa", "iteration_s", "timeline"]

ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """When one group is sent; seconds from the start of backward.

    Args:
        ready_s: its last gradient exists; for an all-gather, the next forward starts.
        start_s: the channel starts it.
        end_s: all ranks have it.
        exposed_s: compute waits for it so long.
        nbytes: bytes of its tensors, without padding.
    """

    ready_s: float
    start_s: float
    end_s: float
    exposed_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class IterationForecast:
    """The prediction for one iteration.

    Args:
        plan: whose prediction it is.
        groups: timing of each group, in sending order; all-gathers run in the next forward.
        backward_end_s: end of backward, including interference, from its start.
        iteration_s: the whole iteration.
        exposed_s: seconds that communication adds to an iteration.
        lower_bound_s: the limit that no schedule can beat.
    """

    plan: Plan
    groups: tuple[GroupTiming, ...]
    backward_end_s: float
    iteration_s: float
    exposed_s: float
    lower_bound_s: float

    @property
    def ratio_to_lower_bound(self) -> float:
        """T/LB; 1.0 if nothing is left to gain."""
        return ratio_to_lower_bound(self.iteration_s, self.lower_bound_s)


def timeline(plan: Plan, trace: Trace, costs: Costs) -> IterationForecast:
    """Predict one steady iteration on one in-order channel.

    Forward starts after backward, all its groups and ``other_s`` (nothing is sent then). The
    tensors of forward wait for their all-gathers.

    Raises:
        ValueError: plan and trace have different tensors.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.planners import plan
        >>> trace, costs = Trace.uniform("w", 250, 1.0, 2.0), Costs(LinearCost(0.5, 0.001))
        >>> timeline(plan("single", trace, costs), trace, costs).iteration_s
        4.5
    """
    backward, forward = _rows(plan, trace, costs)
    spans, clocks, walls = _send_in_backward(backward, costs.kappa)
    ready_s = [clock_s for clock_s, _, _ in backward] + [trace.backward_s]
    if costs.kappa > 0.0:
        ready_s = np.interp(ready_s, clocks, walls).tolist()
    compute_end_s = ready_s.pop()
    backward_end_s = max(walls[-1], compute_end_s)
    forward_begin_s = backward_end_s + trace.other_s
    gathered_s = accumulate((cost_s for _, cost_s, _ in forward), initial=0.0)
    spans += [(forward_begin_s + a, forward_begin_s + b) for a, b in pairwise(gathered_s)]
    ready_s += [forward_begin_s] * len(forward)
    forward_end_s, stalls_s = _forward(forward, trace.forward_s, costs.kappa)
    iteration_s = forward_end_s + backward_end_s + trace.other_s
    late_s = [max(0.0, end - max(start, compute_end_s)) for start, end in spans[: len(backward)]]
    limit_s = lower_bound_s(trace, costs)
    if iteration_s < limit_s <= iteration_s * (1.0 + ROUNDING):
        limit_s = iteration_s  # an iteration that meets its bound: sums in another order
    alone_s = trace.forward_s + trace.backward_s + trace.other_s
    return IterationForecast(
        plan=plan,
        groups=tuple(
            GroupTiming(ready, start, end, exposed, nbytes)
            for ready, (start, end), exposed, (_, _, nbytes) in zip(
                ready_s, spans, late_s + stalls_s, backward + forward, strict=True
            )
        ),
        backward_end_s=compute_end_s,
        iteration_s=iteration_s,
        exposed_s=max(iteration_s - alone_s, 0.0),
        lower_bound_s=limit_s,
    )


def iteration_s(plan: Plan, trace: Trace, costs: Costs) -> float:
    """Predicted seconds of one iteration: ``timeline(...).iteration_s`` without the rest."""
    return iteration_by_kappa(plan, trace, costs)(costs.kappa)


def iteration_by_kappa(plan: Plan, trace: Trace, costs: Costs) -> Callable[[float], float]:
    """:func:`iteration_s` as a function of kappa; computes once what does not depend on it."""
    backward, forward = _rows(plan, trace, costs)
    backward_s, forward_s, other_s = trace.backward_s, trace.forward_s, trace.other_s

    def seconds(kappa: float) -> float:
        _, clocks, walls = _send_in_backward(backward, kappa)
        through_s = float(np.interp(backward_s, clocks, walls)) if kappa > 0.0 else backward_s
        end_s = max(walls[-1], through_s)
        return _forward(forward, forward_s, kappa)[0] + end_s + other_s

    return seconds


Row = tuple[float, float, int]
"""Of a group: when it is ready on the compute clock (gather: forward compute left), cost, bytes."""


def _rows(plan: Plan, trace: Trace, costs: Costs) -> tuple[list[Row], list[Row]]:
    """The groups of backward, and those of forward, in sending order."""
    check_same_tensors(plan, trace)
    ready_clock = trace.ready_times_s[::-1]
    left_s = list(accumulate(t.forward_s for t in reversed(trace.tensors)))[::-1]
    sizes = [t.spec.nbytes for t in trace.tensors]
    cost_of = {operation: costs.of(operation) for operation in Operation}
    backward: list[Row] = []
    forward: list[Row] = []
    for group in plan.groups:
        nbytes = sum(sizes[k] for k in group.tensors)
        cost_s = cost_of[group.operation](nbytes)
        if group.phase is Phase.FORWARD:
            forward.append((left_s[min(group.tensors)], cost_s, nbytes))
        else:
            ready_s = max(ready_clock[k] for k in group.tensors) if plan.overlap else ready_clock[0]
            backward.append((ready_s, cost_s, nbytes))
    return backward, forward


def _send_in_backward(
    rows: Sequence[Row], kappa: float
) -> tuple[list[tuple[float, float]], list[float], list[float]]:
    """When each group starts and ends, and points of the compute clock with their wall times."""
    lag = kappa / (1.0 + kappa)
    free_clock = end_s = busy_s = 0.0
    clocks, walls = [0.0], [0.0]
    spans = []
    for ready, cost_s, _ in rows:
        if free_clock >= ready:
            start_clock, start_s = free_clock, end_s
        else:
            start_clock, start_s = ready, ready + lag * busy_s
        free_clock = start_clock + cost_s * (1.0 - lag)
        end_s = start_s + cost_s
        busy_s += cost_s
        clocks += (start_clock, free_clock)
        walls += (start_s, end_s)
        spans.append((start_s, end_s))
    return spans, clocks, walls


def _forward(rows: Sequence[Row], forward_s: float, kappa: float) -> tuple[float, list[float]]:
    """When forward ends, from its start, and how long it waits for each group.

    All-gathers are sent back to back from its start; each tensor waits for its own.
    """
    speed = 1.0 / (1.0 + kappa)
    # Forward ends at the latest arrival plus the forward compute from there on.
    end_s, clock = 0.0, forward_s
    stalls_s = []
    for left_s, cost_s, _ in rows:
        end_s += cost_s
        later = max(clock, end_s * speed + left_s)
        stalls_s.append((later - clock) / speed)
        clock = later
    return clock + (1.0 - speed) * end_s, stalls_s


def check_same_tensors(plan: Plan, trace: Trace) -> None:
    """Raise ``ValueError`` with the first difference if a plan is for another model."""
    if len(plan.tensors) != len(trace.tensors):
        raise ValueError(
            f"the plan is of {counted(len(plan.tensors), 'tensor')}, the trace of "
            f"{len(trace.tensors)}"
        )
    for index, (ours, row) in enumerate(zip(plan.tensors, trace.tensors, strict=True)):
        theirs = row.spec
        if ours is theirs or (ours.name == theirs.name and ours.nbytes == theirs.nbytes):
            continue
        raise ValueError(
            f"tensor {index} is {ours.name!r} of {ours.nbytes} bytes in the plan, "
            f"{theirs.name!r} of {theirs.nbytes} in the trace"
        )

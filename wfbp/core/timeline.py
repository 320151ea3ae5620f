"""One steady iteration under a plan, predicted exactly from a trace and costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wfbp.core.bound import lower_bound_s
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """When one group travels; seconds from the start of backward.

    Args:
        ready_s: the last of its gradients exists.
        start_s: the channel takes it up.
        end_s: it has arrived everywhere.
        nbytes: bytes of its tensors, without padding.
    """

    ready_s: float
    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The prediction for one iteration.

    Args:
        groups: timing of each group of the plan, in sending order.
        backward_end_s: backward's end, interference included, from its start.
        iteration_s: the whole iteration.
        exposed_s: what communication adds to an iteration without it.
        lower_bound_s: what no schedule can beat.
    """

    groups: tuple[GroupTiming, ...]
    backward_end_s: float
    iteration_s: float
    exposed_s: float
    lower_bound_s: float

    @property
    def ratio_to_lower_bound(self) -> float:
        """T / LB: 1.0 where nothing is left to gain."""
        if self.lower_bound_s == 0.0:
            return 1.0 if self.iteration_s == 0.0 else float("inf")
        return self.iteration_s / self.lower_bound_s


def timeline(plan: Plan, trace: Trace, costs: Costs) -> Timeline:
    """Predict one steady iteration of an all-reduce plan on one in-order channel.

    Args:
        plan: of exactly the trace's tensors; all groups all-reduced in backward.
        trace: sizes and compute times.
        costs: of the channel.

    Returns:
        The times of every group and of the iteration.

    Raises:
        ValueError: plan and trace are not of the same tensors, or a group is not all-reduced.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.planners import plan
        >>> from wfbp.core.trace import TraceTensor
        >>> from wfbp.core.types import TensorSpec
        >>> tensor = TraceTensor(TensorSpec("w", (250,), "float32"), 1.0, 2.0)
        >>> trace, costs = Trace("one", (tensor,)), Costs(LinearCost(0.5, 0.001))
        >>> timeline(plan("single", trace, costs), trace, costs).iteration_s
        4.5
    """
    groups, backward_end_s = _backward(plan, trace, costs)
    # One term per phase: decoupled groups would lengthen forward in the same way.
    finish_s = max(groups[-1].end_s, backward_end_s)
    iteration_s = trace.forward_s + finish_s + trace.other_s
    limit_s = lower_bound_s(trace, costs)
    if iteration_s < limit_s <= iteration_s * (1.0 + ROUNDING):
        limit_s = iteration_s  # an iteration that meets its bound: sums in another order
    alone_s = trace.forward_s + trace.backward_s + trace.other_s
    return Timeline(
        groups=groups,
        backward_end_s=backward_end_s,
        iteration_s=iteration_s,
        exposed_s=max(iteration_s - alone_s, 0.0),
        lower_bound_s=limit_s,
    )


def iteration_s(plan: Plan, trace: Trace, costs: Costs) -> float:
    """Predicted seconds of one iteration: ``timeline(...).iteration_s`` without the rest.

    Raises:
        ValueError: as :func:`timeline`.
    """
    groups, backward_end_s = _backward(plan, trace, costs)
    return trace.forward_s + max(groups[-1].end_s, backward_end_s) + trace.other_s


def _backward(plan: Plan, trace: Trace, costs: Costs) -> tuple[tuple[GroupTiming, ...], float]:
    """Timing of the groups sent in backward, and the end of backward.

    Two clocks are kept. The compute clock shows how much of backward is done: it runs with the
    wall clock while the channel is idle and 1 + kappa times slower while it is busy, so ready
    times are constants on it and a message of c seconds takes c / (1 + kappa). The wall clock
    is ahead of it by kappa / (1 + kappa) for each second that the channel was busy. (After
    backward nothing computes any more; going on by the same rule gives the same wall times.)
    """
    _check_same_tensors(plan, trace)
    ready_clock = trace.ready_times_s[::-1]
    sizes = [t.spec.nbytes for t in trace.tensors]
    backward_s = ready_clock[0]
    lag = costs.kappa / (1.0 + costs.kappa)
    free_clock = end_s = busy_s = 0.0
    clocks, walls = [0.0], [0.0]
    rows = []
    for group in plan.groups:
        if group.operation is not Operation.ALL_REDUCE:
            raise ValueError(
                f"plan {plan.schedule!r} has a group sent by {group.operation.value}; "
                "only all_reduce groups can be predicted"
            )
        nbytes = sum(sizes[k] for k in group.tensors)
        cost_s = costs.all_reduce(nbytes)
        ready = max(ready_clock[k] for k in group.tensors) if plan.overlap else backward_s
        if free_clock >= ready:
            start_clock, start_s = free_clock, end_s
        else:
            start_clock, start_s = ready, ready + lag * busy_s
        free_clock = start_clock + cost_s * (1.0 - lag)
        end_s = start_s + cost_s
        busy_s += cost_s
        clocks += (start_clock, free_clock)
        walls += (start_s, end_s)
        rows.append((ready, start_s, end_s, nbytes))
    ready_s = [row[0] for row in rows] + [backward_s]
    if costs.kappa > 0.0:
        ready_s = np.interp(ready_s, clocks, walls).tolist()
    timings = tuple(
        GroupTiming(at, start, end, nbytes)
        for at, (_, start, end, nbytes) in zip(ready_s, rows, strict=False)
    )
    return timings, ready_s[-1]


def _check_same_tensors(plan: Plan, trace: Trace) -> None:
    if len(plan.tensors) != len(trace.tensors):
        raise ValueError(
            f"the plan is of {len(plan.tensors)} tensors, the trace of {len(trace.tensors)}"
        )
    for index, (ours, row) in enumerate(zip(plan.tensors, trace.tensors, strict=True)):
        theirs = row.spec
        if ours is theirs or (ours.name == theirs.name and ours.nbytes == theirs.nbytes):
            continue
        raise ValueError(
            f"tensor {index} is {ours.name!r} of {ours.nbytes} bytes in the plan, "
            f"{theirs.name!r} of {theirs.nbytes} in the trace"
        )

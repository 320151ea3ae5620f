"""The two phases of an iteration under a plan: when each group travels and when compute ends.

Two clocks are kept. The *compute clock* shows how much of the phase is computed: it runs with the
wall clock while the channel is idle and 1 + kappa times slower while it is busy. On it a message
of c seconds takes c / (1 + kappa) and ready times are constants, so interference is gone. The wall
clock is ahead of it by kappa / (1 + kappa) for each second that the channel was busy. (Where
nothing computes any more, going on by the same rule gives the same wall times.)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """When one group travels; seconds from the start of backward.

    Args:
        ready_s: the group may leave: the last of its gradients exists, or, for an all-gather,
            the next forward starts.
        start_s: the channel takes it up.
        end_s: it has arrived everywhere.
        nbytes: bytes of its tensors, without padding.
    """

    ready_s: float
    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class PhaseTiming:
    """One phase; seconds from its start.

    Args:
        groups: its groups in sending order.
        compute_end_s: its computation ends.
        end_s: the other phase may begin.
    """

    groups: tuple[GroupTiming, ...]
    compute_end_s: float
    end_s: float


def backward_phase(plan: Plan, trace: Trace, costs: Costs) -> PhaseTiming:
    """Backward: groups leave in order, each when its last gradient exists.

    The phase ends once backward is through and all its groups have arrived.

    Raises:
        ValueError: plan and trace are not of the same tensors.
    """
    check_same_tensors(plan, trace)
    ready_clock = trace.ready_times_s[::-1]
    sizes = [t.spec.nbytes for t in trace.tensors]
    backward_s = ready_clock[0]
    lag = costs.kappa / (1.0 + costs.kappa)
    cost_of = {operation: costs.of(operation) for operation in Operation}
    free_clock = end_s = busy_s = 0.0
    clocks, walls = [0.0], [0.0]
    rows = []
    for group in plan.groups[: plan.num_backward]:
        nbytes = sum(sizes[k] for k in group.tensors)
        cost_s = cost_of[group.operation](nbytes)
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
    return PhaseTiming(timings, ready_s[-1], max(end_s, ready_s[-1]))


def forward_phase(plan: Plan, trace: Trace, costs: Costs) -> PhaseTiming:
    """Forward: all-gathers leave back to back from its start, and each tensor waits for its own.

    What is left of forward at a tensor follows its all-gather, so on the compute clock forward
    ends at the latest of all (arrival + forward compute from there on), and never before T_f.
    """
    groups = plan.groups[plan.num_backward :]
    if not groups:
        return PhaseTiming((), trace.forward_s, trace.forward_s)
    left_s = list(accumulate(t.forward_s for t in reversed(trace.tensors)))[::-1]
    speed = 1.0 / (1.0 + costs.kappa)
    rows = []
    end_s, clock = 0.0, trace.forward_s
    for group in groups:
        nbytes = sum(trace.tensors[k].spec.nbytes for k in group.tensors)
        start_s, end_s = end_s, end_s + costs.of(group.operation)(nbytes)
        rows.append(GroupTiming(0.0, start_s, end_s, nbytes))
        clock = max(clock, end_s * speed + left_s[min(group.tensors)])
    finish_s = clock + (1.0 - speed) * end_s
    return PhaseTiming(tuple(rows), finish_s, finish_s)


def check_same_tensors(plan: Plan, trace: Trace) -> None:
    """Refuse a plan for another model.

    Raises:
        ValueError: with the first difference.
    """
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

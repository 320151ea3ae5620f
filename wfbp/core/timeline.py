"""One steady iteration under a plan, predicted exactly from a trace and costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wfbp.core.bound import lower_bound_s
from wfbp.core.cost import Costs
from wfbp.core.phases import GroupTiming, backward_phase, forward_phase
from wfbp.core.plan import Plan
from wfbp.core.trace import Trace

__all__ = ["GroupTiming", "Timeline", "iteration_s", "timeline"]

ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Timeline:
    """The prediction for one iteration.

    Args:
        groups: timing of each group of the plan, in sending order; the all-gathers come behind
            the end of backward, in the forward that follows.
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
    """Predict one steady iteration on one in-order channel.

    The channel carries the groups of backward in order, then those of forward. Forward starts
    when backward and all its groups are through; its tensors wait for their all-gathers.
    ``other_s`` lies between the two, and nothing is sent then.

    Args:
        plan: of exactly the trace's tensors.
        trace: sizes and compute times.
        costs: of the channel.

    Returns:
        The times of every group and of the iteration.

    Raises:
        ValueError: plan and trace are not of the same tensors.

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
    backward = backward_phase(plan, trace, costs)
    forward = forward_phase(plan, trace, costs)
    iteration_s = forward.end_s + backward.end_s + trace.other_s
    limit_s = lower_bound_s(trace, costs)
    if iteration_s < limit_s <= iteration_s * (1.0 + ROUNDING):
        limit_s = iteration_s  # an iteration that meets its bound: sums in another order
    alone_s = trace.forward_s + trace.backward_s + trace.other_s
    start_s = backward.end_s + trace.other_s
    gathers = tuple(
        replace(g, ready_s=start_s, start_s=start_s + g.start_s, end_s=start_s + g.end_s)
        for g in forward.groups
    )
    return Timeline(
        groups=backward.groups + gathers,
        backward_end_s=backward.compute_end_s,
        iteration_s=iteration_s,
        exposed_s=max(iteration_s - alone_s, 0.0),
        lower_bound_s=limit_s,
    )


def iteration_s(plan: Plan, trace: Trace, costs: Costs) -> float:
    """Predicted seconds of one iteration: ``timeline(...).iteration_s`` without the rest.

    Raises:
        ValueError: as :func:`timeline`.
    """
    backward = backward_phase(plan, trace, costs)
    return forward_phase(plan, trace, costs).end_s + backward.end_s + trace.other_s

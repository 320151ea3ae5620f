"""Why each message of a predicted iteration leaves when it does, and what waits for it."""

from __future__ import annotations

from wfbp.core.cost import Costs
from wfbp.core.timeline import IterationForecast
from wfbp.core.trace import Trace
from wfbp.core.types import Phase
from wfbp.sim.simulate import simulate

_SAME = 1e-9  # relative; rounding may differ by as much


def reasons(predicted: IterationForecast, trace: Trace, costs: Costs) -> list[tuple[float, str]]:
    """Exposed seconds of each group, and the reason for its start, a line for people."""
    plan = predicted.plan
    same_s = _SAME * predicted.iteration_s
    stalls_s = _stalls(predicted, trace, costs)
    told = []
    for index, (group, at) in enumerate(zip(plan.groups, predicted.groups, strict=True)):
        if group.phase is Phase.BACKWARD:
            exposed_s = max(0.0, at.end_s - max(at.start_s, predicted.backward_end_s))
            why = f"leaves when {plan.tensors[min(group.tensors)].name} is ready"
        else:
            exposed_s = stalls_s.get(index, 0.0)
            why = "leaves when forward starts"
        waited_s = at.start_s - at.ready_s
        if waited_s > same_s:
            why = f"waits {waited_s * 1e3:,.3f} ms for the channel"
        why += f"; {exposed_s * 1e3:,.3f} ms exposed" if exposed_s > same_s else "; hidden"
        told.append((exposed_s, why))
    return told


def _stalls(predicted: IterationForecast, trace: Trace, costs: Costs) -> dict[int, float]:
    """Seconds that forward waits for each all-gather, by group."""
    plan = predicted.plan
    gathers = list(enumerate(plan.groups))[plan.num_backward :]
    group_of = {k: index for index, group in gathers for k in group.tensors}
    if not group_of:
        return {}
    last = simulate(plan, trace, costs, iterations=3).iterations[-1]
    stalls = dict.fromkeys(group_of.values(), 0.0)
    before_s = last.start_s
    for span in last.compute:
        if span.phase is Phase.FORWARD and span.tensor in group_of:
            stalls[group_of[span.tensor]] += span.start_s - before_s
        before_s = span.end_s
    return stalls

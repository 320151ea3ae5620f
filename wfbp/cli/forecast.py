"""Predicts a plan's iteration, group by group, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace
from wfbp.core.types import Operation, Phase

_SAME = 1e-9  # relative; rounding may differ by as much


@dataclass(frozen=True, slots=True)
class GroupForecast:
    """One message, in seconds from the start of backward; ``why`` is one line for people."""

    phase: Phase
    operation: Operation
    tensors: tuple[str, ...]
    nbytes: int
    start_s: float
    end_s: float
    exposed_s: float
    why: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for one steady iteration under one plan."""

    schedule: str
    iteration_s: float
    exposed_s: float
    lower_bound_s: float
    ratio_to_lower_bound: float
    backward_end_s: float
    groups: tuple[GroupForecast, ...]

    def to_json(self) -> dict[str, Any]:
        """The forecast as ``wfbp plan --json`` prints it."""
        figures = ("iteration_s", "exposed_s", "lower_bound_s", "ratio_to_lower_bound")
        return {
            "schedule": self.schedule,
            "predicted": {name: getattr(self, name) for name in figures},
            "groups": [
                {
                    "phase": g.phase.value,
                    "operation": g.operation.value,
                    "tensors": list(g.tensors),
                    "nbytes": g.nbytes,
                    "start_s": g.start_s,
                    "end_s": g.end_s,
                }
                for g in self.groups
            ],
        }


def forecast(plan: Plan, trace: Trace, costs: Costs) -> Forecast:
    """Predict one iteration, with a reason for every group."""
    times = timeline(plan, trace, costs)
    same_s = _SAME * times.iteration_s
    stalls_s = _stalls(plan, trace, costs)
    names = [spec.name for spec in plan.tensors]
    groups = []
    for index, (group, at) in enumerate(zip(plan.groups, times.groups, strict=True)):
        if group.phase is Phase.BACKWARD:
            exposed_s = max(0.0, at.end_s - max(at.start_s, times.backward_end_s))
            why = f"leaves when {names[min(group.tensors)]} is ready"
        else:
            exposed_s = stalls_s.get(index, 0.0)
            why = "leaves when forward starts"
        waited_s = at.start_s - at.ready_s
        if waited_s > same_s:
            why = f"waits {waited_s * 1e3:,.3f} ms for the channel"
        why += f"; {exposed_s * 1e3:,.3f} ms exposed" if exposed_s > same_s else "; hidden"
        members = tuple(names[k] for k in group.tensors)
        groups.append(
            GroupForecast(
                group.phase,
                group.operation,
                members,
                at.nbytes,
                at.start_s,
                at.end_s,
                exposed_s,
                why,
            )
        )
    return Forecast(
        plan.schedule,
        times.iteration_s,
        times.exposed_s,
        times.lower_bound_s,
        times.ratio_to_lower_bound,
        times.backward_end_s,
        tuple(groups),
    )


def _stalls(plan: Plan, trace: Trace, costs: Costs) -> dict[int, float]:
    """Seconds that forward waits for each all-gather, by group."""
    group_of = {
        k: index
        for index, group in enumerate(plan.groups)
        if group.phase is Phase.FORWARD
        for k in group.tensors
    }
    if not group_of:
        return {}
    from wfbp.sim.simulate import simulate

    last = simulate(plan, trace, costs, iterations=3).iterations[-1]
    stalls: dict[int, float] = {}
    before_s = last.start_s
    for span in last.compute:
        if span.phase is Phase.FORWARD and span.tensor in group_of:
            group = group_of[span.tensor]
            stalls[group] = stalls.get(group, 0.0) + span.start_s - before_s
        before_s = span.end_s
    return stalls

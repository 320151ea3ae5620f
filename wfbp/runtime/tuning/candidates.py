"""The plans that a tuner may run: by schedule, and the candidates of ``auto``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from wfbp.core import planners
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.plan import Group, Plan
from wfbp.core.planners import PLANNERS
from wfbp.core.planners.coarsening import coarsened, even_progress, expanded, spread_boundaries
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import Operation, TensorSpec

MAX_EXACT = 192
"""Slow planners merge neighbours in models of more tensors; costs: planning-time.md."""
_HOPELESS = 2.0
"""Plans predicted longer than the best by this factor are not tried, except the simplest."""
_MAX_CANDIDATES = 12
_MAX_FURTHER = 3
_FURTHER_THRESHOLDS = tuple(2.0**power for power in (-5, -4, -3, -2, -1, 1, 2, 3))
"""Of a search, as factors of the threshold that it begins with."""


def first_plan(schedule: str, specs: Sequence[TensorSpec], threshold_bytes: int) -> Plan:
    """The plan before measurements; decoupled if possible, so that sharded state is never whole."""
    nominal = Trace("unmeasured", tuple(TraceTensor(spec, 0.0, 0.0) for spec in specs))
    entry = PLANNERS.get(schedule)
    if entry is not None and entry.decouples:
        name = "dear"
    else:
        name = schedule if entry is not None and not entry.measures else "threshold"
    return make(name, nominal, Costs(LinearCost(0.0, 0.0)), threshold_bytes)


def make(name: str, trace: Trace, costs: Costs, threshold_bytes: int) -> Plan:
    """The plan of a schedule."""
    entry = PLANNERS[name]
    num_tensors = len(trace.tensors)
    if num_tensors > MAX_EXACT and entry.slow:
        boundaries = spread_boundaries(even_progress(trace), 0, num_tensors, MAX_EXACT)
        return expanded(planners.plan(name, coarsened(trace, boundaries), costs), trace, boundaries)
    options = {"threshold_bytes": threshold_bytes} if entry.takes_threshold else {}
    return planners.plan(name, trace, costs, **options)


def fixed_candidates(schedule: str, trace: Trace, costs: Costs, threshold_bytes: int) -> list[Plan]:
    """The plan of a schedule, and those of other thresholds if it searches one."""
    factors = (1.0, *_FURTHER_THRESHOLDS) if PLANNERS[schedule].searches else (1.0,)
    thresholds = [max(1, round(threshold_bytes * factor)) for factor in factors]
    return distinct(make(schedule, trace, costs, threshold) for threshold in thresholds)


def auto_candidates(
    trace: Trace, costs: Costs, threshold_bytes: int, decouples: bool
) -> list[Plan]:
    """The plans worth a trial: the simplest first, then those with the best predictions."""
    plans = [make(name, trace, costs, threshold_bytes) for name in _names(decouples)]
    # Communication may slow backward down by more than it hides there; only a trial can tell.
    after_s = [0.0] * (len(trace.tensors) - 1) + [trace.backward_s]
    rows = tuple(replace(t, backward_s=s) for t, s in zip(trace.tensors, after_s, strict=True))
    plans.append(held(make("oasr", replace(trace, tensors=rows), costs, threshold_bytes)))
    predicted_s = {plan.digest: iteration_s(plan, trace, costs) for plan in plans}
    limit_s = _HOPELESS * min(predicted_s.values())
    simplest = min(plans, key=lambda p: len(p.groups))
    hopeful = [plan for plan in plans if predicted_s[plan.digest] < limit_s]
    hopeful = distinct([simplest, *sorted(hopeful, key=lambda p: predicted_s[p.digest])])
    # All-reduce before the rest: to change from one kind to the other moves optimizer state.
    return [simplest, *sorted(hopeful[1:_MAX_CANDIDATES], key=lambda p: bool(p.decoupled))]


def further_candidates(
    tried: Sequence[Plan], trace: Trace, costs: Costs, decouples: bool
) -> list[Plan]:
    """A few untried plans predicted to beat ``tried[0]``, now that interference is known."""
    names = [name for name in _names(decouples) if PLANNERS[name].measures]
    plans = distinct([*tried, *(make(name, trace, costs, 0) for name in names)])[len(tried) :]
    limit_s = iteration_s(tried[0], trace, costs)
    predicted = sorted((iteration_s(plan, trace, costs), k) for k, plan in enumerate(plans))
    return [plans[k] for seconds, k in predicted[:_MAX_FURTHER] if seconds < limit_s]


def _names(decouples: bool) -> list[str]:
    return [
        name
        for name, entry in PLANNERS.items()
        if not entry.baseline and (decouples or not entry.decouples)
    ]


def held(plan: Plan) -> Plan:
    """The plan with all groups sent when the step closes."""
    return replace(plan, overlap=False)


def reordered(plan: Plan, trace: Trace) -> Plan:
    """The same groups over the trace's order of tensors, so that one trace predicts all plans."""
    if plan.tensors == trace.specs:
        return plan
    place = {spec.name: k for k, spec in enumerate(trace.specs)}
    groups = tuple(
        replace(g, tensors=tuple(place[plan.tensors[k].name] for k in g.tensors))
        for g in plan.groups
    )
    return replace(plan, tensors=trace.specs, groups=groups)


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Without plans that send the same groups in the same way as an earlier one."""
    kept: dict[object, Plan] = {}
    for plan in plans:
        kept.setdefault((plan.groups, plan.overlap), plan)
    return list(kept.values())


def encode(plans: Sequence[Plan]) -> list[Any]:
    """Plans as JSON's types, without the tensors, which all ranks know."""
    return [
        [p.schedule, p.overlap, [[g.tensors, g.operation.value] for g in p.groups]] for p in plans
    ]


def decode(documents: Sequence[Any], trace: Trace) -> list[Plan]:
    """The plans that :func:`encode` wrote, for a trace's tensors."""
    plans = []
    for schedule, overlap, groups in documents:
        made = (Group(tuple(t), Operation(name)) for t, name in groups)
        plans.append(Plan(schedule, trace.specs, tuple(made), overlap))
    return plans


def with_packing(costs: Costs, packing_s_per_byte: float) -> Costs:
    """Measured costs that include packing each group before it is sent."""
    curves: dict[str, Any] = {}
    for operation in Operation:
        curve = getattr(costs, operation.value)
        if isinstance(curve, PiecewiseCost):
            points = ((size, s + size * packing_s_per_byte) for size, s in curve.points)
            curves[operation.value] = PiecewiseCost(tuple(points))
    return replace(costs, **curves)

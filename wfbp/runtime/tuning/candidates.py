"""The plans that a tuner may run: by schedule, and the candidates of ``auto``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from wfbp.core import planners
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.plan import Plan
from wfbp.core.planners import PLANNERS
from wfbp.core.planners.coarsening import coarsened, even_progress, expanded, spread_boundaries
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec

MAX_EXACT = 192
"""Slow planners merge neighbours in models of more tensors; costs: planning-time.md."""
_HOPELESS = 2.0
"""Plans predicted longer than the best by this factor are not tried, except the simplest."""
_GUESSED_KAPPA = 0.5
_SEARCHED = tuple(2.0**power for power in (0, -5, -4, -3, -2, -1, 1, 2, 3))
"""Factors of the thresholds that a search tries."""


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
    factors = _SEARCHED if PLANNERS[schedule].searches else (1.0,)
    thresholds = [max(1, round(threshold_bytes * factor)) for factor in factors]
    return distinct(make(schedule, trace, costs, threshold) for threshold in thresholds)


def auto_candidates(
    trace: Trace, costs: Costs, threshold_bytes: int, decouples: bool, most: int | None = None
) -> list[Plan]:
    """The plans worth a trial: the simplest first, then (at most so many) those with the best
    predictions."""
    names = [
        name
        for name, entry in PLANNERS.items()
        if not entry.baseline and (decouples or not entry.decouples)
    ]

    def predicted_of(plan: Plan) -> float:
        return iteration_s(plan, trace, costs)

    plans = []
    for name in names:  # of a schedule that searches a threshold, the two most promising ones
        fixed = fixed_candidates(name, trace, costs, threshold_bytes)
        plans += sorted(fixed, key=predicted_of)[:2]
    # Messages also share memory with compute, or run while it waits: plan for other interference.
    other = replace(costs, kappa=0.0 if costs.kappa > _GUESSED_KAPPA / 2 else _GUESSED_KAPPA)
    plans += [make(n, trace, other, threshold_bytes) for n in ("oasr", "hybrid") if n in names]
    # Communication may slow backward down by more than it hides there; only a trial can tell.
    after_s = [0.0] * (len(trace.tensors) - 1) + [trace.backward_s]
    rows = tuple(replace(t, backward_s=s) for t, s in zip(trace.tensors, after_s, strict=True))
    after = make("oasr", replace(trace, tensors=rows), costs, threshold_bytes)
    plans = distinct([*plans, replace(after, overlap=False)])
    predicted_s = {plan.digest: predicted_of(plan) for plan in plans}
    limit_s = _HOPELESS * min(predicted_s.values())
    simplest = min(plans, key=lambda p: len(p.groups))
    others = [p for p in plans if p is not simplest and predicted_s[p.digest] < limit_s]
    others = sorted(others, key=lambda p: predicted_s[p.digest])[:most]
    # All-reduce before the rest: to change from one kind to the other moves optimizer state.
    others.sort(key=lambda p: (bool(p.decoupled), predicted_s[p.digest]))
    return [simplest, *others]


def sent_fastest(plan: Plan, costs: Mapping[str, Costs]) -> Plan:
    """The same groups, each of backward sent in the way that takes least time by these costs, and
    of equal ways in the first."""

    def fastest(group: int) -> str:
        operation, nbytes = plan.groups[group].operation, plan.nbytes(group)
        return min(costs, key=lambda wire: costs[wire].of(operation)(nbytes))

    return plan.with_wires(fastest)


def reordered(plan: Plan, trace: Trace) -> Plan:
    """The same groups over the trace's order of tensors, so that one trace predicts all plans."""
    place = {spec.name: k for k, spec in enumerate(trace.specs)}
    groups = tuple(
        replace(g, tensors=tuple(place[plan.tensors[k].name] for k in g.tensors))
        for g in plan.groups
    )
    return replace(plan, tensors=trace.specs, groups=groups)


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Without plans that send the same groups in the same way as an earlier one.

    One message of all gradients leaves after backward, with overlap or without.
    """
    kept: dict[object, Plan] = {}
    for plan in plans:
        kept.setdefault((plan.groups, plan.overlap or len(plan.groups) == 1), plan)
    return list(kept.values())

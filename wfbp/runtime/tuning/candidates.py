"""The plans that a tuner may run: by schedule, and those between which ``auto`` chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wfbp.core import planners
from wfbp.core.checks import one_of
from wfbp.core.cost import CostModel, Costs, LinearCost, PiecewiseCost
from wfbp.core.plan import Group, Plan
from wfbp.core.planners.coarsening import coarsened, even_progress, expanded, spread_boundaries
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import (
    ALL_REDUCE_SCHEDULES,
    AUTO,
    DECOUPLED_SCHEDULES,
    SCHEDULES,
    Operation,
    Phase,
    TensorSpec,
)

UNMEASURED = ("single", "threshold", "wfbp")
"""Planners that look at sizes only."""

MAX_EXACT = 192
"""Planners whose time grows with the square of the number of tensors join neighbours beyond this,
so that training is not held up; docs/benchmarks/plan.md says what that costs and saves."""
_SLOW = ("oasr", "ipart", "independent", "hybrid")

_BASELINES = ("ps", "ps_layerwise")
_HOPELESS = 1.5
_NUM_FURTHER = 3


def check_schedule(schedule: str, decouples: bool, user: str = "") -> None:
    """Raise ``ValueError`` unless the schedule exists and, where it decouples, ``decouples`` allows
    it.

    ``user`` is what needs whole gradients otherwise, for the message.
    """
    known = SCHEDULES if decouples else (AUTO, *ALL_REDUCE_SCHEDULES)
    why = ""
    if schedule in DECOUPLED_SCHEDULES:
        why = f": {user or 'the caller'} needs whole gradients"
    one_of("schedule", schedule, known, why)


def first_plan(schedule: str, specs: Sequence[TensorSpec], threshold_bytes: int) -> Plan:
    """The plan before anything is measured: groups of at least so many bytes, unless the schedule
    looks at sizes only anyway.

    A schedule that decouples begins decoupled, so state that is to be sharded is never whole.

    >>> specs = [TensorSpec("w", (9,), "float32")]
    >>> [first_plan(name, specs, 1).schedule for name in ("wfbp", "oasr", "hybrid")]
    ['wfbp', 'threshold', 'dear']
    """
    nominal = Trace("unmeasured", tuple(TraceTensor(spec, 0.0, 0.0) for spec in specs))
    costs = Costs(LinearCost(0.0, 0.0))
    if schedule in DECOUPLED_SCHEDULES:
        return planners.plan("dear", nominal, costs, threshold_bytes=threshold_bytes)
    name = schedule if schedule in UNMEASURED else "threshold"
    return make(name, nominal, costs, threshold_bytes)


def make(name: str, trace: Trace, costs: Costs, threshold_bytes: int) -> Plan:
    """The plan of a schedule; ``threshold_bytes`` is for ``threshold`` alone."""
    options = {"threshold_bytes": threshold_bytes} if name == "threshold" else {}
    num_tensors = len(trace.tensors)
    if num_tensors <= MAX_EXACT or name not in _SLOW:
        return planners.plan(name, trace, costs, **options)
    boundaries = spread_boundaries(even_progress(trace), 0, num_tensors, MAX_EXACT)
    return expanded(planners.plan(name, coarsened(trace, boundaries), costs), trace, boundaries)


def encode_groups(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Plans as plain data, without the tensors, which all ranks know."""
    documents = [plan.to_json() for plan in plans]
    return [{key: d[key] for key in d if key != "tensors"} for d in documents]


def decode_groups(documents: Sequence[dict[str, Any]], trace: Trace) -> list[Plan]:
    """The plans that :func:`encode_groups` wrote, of a trace's tensors.

    >>> specs = [TensorSpec("w", (9,), "float32")]
    >>> plan = first_plan("wfbp", specs, 1)
    >>> trace = Trace("t", (TraceTensor(specs[0], 0.0, 1.0),))
    >>> decode_groups(encode_groups([plan]), trace) == [plan]
    True
    """
    return [
        Plan(
            d["schedule"],
            trace.specs,
            tuple(
                Group(tuple(g["tensors"]), Operation(g["operation"]), Phase(g["phase"]))
                for g in d["groups"]
            ),
            d["overlap"],
        )
        for d in documents
    ]


def auto_candidates(
    trace: Trace, costs: Costs, threshold_bytes: int, decouples: bool
) -> list[Plan]:
    """The starting plan, what simulates best, and what else might beat it in reality."""
    held_trace = Trace(
        trace.model,
        tuple(
            replace(t, backward_s=trace.backward_s if k == len(trace.tensors) - 1 else 0.0)
            for k, t in enumerate(trace.tensors)
        ),
    )
    plans = [make(name, trace, costs, threshold_bytes) for name in _names(decouples)]
    plans.append(held(make("oasr", held_trace, costs, threshold_bytes)))
    predicted = {p.digest: timeline(p, trace, costs).iteration_s for p in plans}
    best_s = min(predicted.values())
    # All-reduce first: to change from one kind to the other moves optimizer state.
    plans.sort(key=lambda p: (len(p.groups) > p.num_backward, predicted[p.digest]))
    started = make("threshold", trace, costs, threshold_bytes)
    return distinct([started] + [p for p in plans if predicted[p.digest] < _HOPELESS * best_s])


def further_candidates(
    tried: Sequence[Plan], chosen: Plan, trace: Trace, costs: Costs, decouples: bool
) -> list[Plan]:
    """A few untried plans that should beat the chosen one, by the interference that its trial
    showed; the one predicted to be fastest first.

    Planners first ran without knowing how much communication slows computation down. With ``costs``
    that have it they overlap less: another hybrid, or other groups.
    """
    names = [name for name in _names(decouples) if name not in UNMEASURED]
    plans = distinct([*tried, *(make(name, trace, costs, 0) for name in names)])[len(tried) :]
    limit_s = timeline(chosen, trace, costs).iteration_s
    predicted = [(timeline(plan, trace, costs).iteration_s, k) for k, plan in enumerate(plans)]
    better = sorted((seconds, k) for seconds, k in predicted if seconds < limit_s)
    return [plans[k] for _, k in better[:_NUM_FURTHER]]


def _names(decouples: bool) -> list[str]:
    """The schedules that ``auto`` asks for plans."""
    others = [name for name in DECOUPLED_SCHEDULES if name not in _BASELINES] if decouples else []
    return [*ALL_REDUCE_SCHEDULES, *others]


def held(plan: Plan) -> Plan:
    """The same groups, all of which leave when the step closes."""
    return replace(plan, overlap=False)


def with_packing(costs: Costs, packing_s_per_byte: float) -> Costs:
    """Costs as groups have them: a group is packed before it travels."""

    def packed(curve: CostModel | None) -> CostModel | None:
        if curve is None:
            return None
        assert isinstance(curve, PiecewiseCost)
        return PiecewiseCost(tuple((n, s + n * packing_s_per_byte) for n, s in curve.points))

    all_reduce = packed(costs.all_reduce)
    assert all_reduce is not None
    return Costs(all_reduce, packed(costs.reduce_scatter), packed(costs.all_gather), costs.kappa)


def reordered(plan: Plan, trace: Trace) -> Plan:
    """The same groups over the trace's tensor order, so that one trace predicts all candidates."""
    place = {spec: k for k, spec in enumerate(trace.specs)}
    groups = tuple(
        replace(g, tensors=tuple(place[plan.tensors[k]] for k in g.tensors)) for g in plan.groups
    )
    return replace(plan, tensors=trace.specs, groups=groups)


def distinct(plans: Sequence[Plan]) -> list[Plan]:
    """Without plans that send the same groups in the same way as an earlier one."""
    seen = set()
    kept = []
    for plan in plans:
        key = (plan.tensors, plan.groups, plan.overlap)
        if key not in seen:
            seen.add(key)
            kept.append(plan)
    return kept

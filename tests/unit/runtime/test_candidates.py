"""The plans between which ``auto`` chooses, against every planner's plan."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.benchmarks.plan import make_cost, make_trace
from tests.support import reference
from wfbp.core import planners
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.plan import Plan
from wfbp.core.planners import ALL_REDUCE_SCHEDULES
from wfbp.core.planners import DECOUPLED_SCHEDULES as DECOUPLED
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec
from wfbp.runtime.tuning.candidates import MAX_EXACT, auto_candidates, make

THRESHOLD_BYTES = 40


def decouples(plan: Plan) -> bool:
    return len(plan.groups) > plan.num_backward


@pytest.mark.parametrize("decoupled", [True, False])
def test_candidates_of_random_traces(decoupled: bool) -> None:
    rng = random.Random(7)
    num_decoupled = 0
    for number in range(60):
        trace = reference.random_trace(rng, rng.randint(1, 14))
        costs = Costs(reference.random_cost(rng, linear=number % 2 == 0))
        found = auto_candidates(trace, costs, THRESHOLD_BYTES, decoupled)
        assert len({(p.groups, p.overlap) for p in found}) == len(found)
        assert len(found) <= 12
        assert sum(len(p.groups) == 1 for p in found) <= 1

        names = [n for n in planners.PLANNERS if decoupled or n in ALL_REDUCE_SCHEDULES]
        rivals = [make(n, trace, costs, THRESHOLD_BYTES) for n in names if not n.startswith("ps")]
        best_s = min(iteration_s(p, trace, costs) for p in rivals)
        predicted = [iteration_s(p, trace, costs) for p in found]
        assert min(predicted) <= best_s * (1 + 1e-12)
        assert max(predicted[1:], default=0.0) < 2.0 * best_s

        # The simplest comes first; then of each kind the best, and all-reduce before what moves
        # optimizer state.
        assert len(found[0].groups) == min(len(p.groups) for p in found)
        order = [(decouples(p), s) for p, s in zip(found[1:], predicted[1:], strict=True)]
        assert order == sorted(order)
        assert not {p.schedule for p in found} & {"ps", "ps_layerwise"}
        if not decoupled:
            assert not any(map(decouples, found))
        num_decoupled += any(map(decouples, found))
    assert num_decoupled > 30 or not decoupled


def test_a_network_that_forward_must_help_to_hide() -> None:
    """All that a schedule of all-reduces can do is hide half of the communication."""
    specs = (TensorSpec(f"t{k}", (250_000,), "float32") for k in range(10))
    trace = Trace("even", tuple(TraceTensor(spec, 0.1, 0.1) for spec in specs))
    costs = Costs(LinearCost(1e-4, 2e-7))
    found = auto_candidates(trace, costs, THRESHOLD_BYTES, decouples=True)
    best = min(found, key=lambda p: iteration_s(p, trace, costs))
    assert decouples(best)
    assert {p.schedule for p in found if decouples(p)} <= set(DECOUPLED)
    whole = auto_candidates(trace, costs, THRESHOLD_BYTES, decouples=False)
    gain = min(iteration_s(p, trace, costs) for p in whole) / iteration_s(best, trace, costs)
    assert gain > 1.2


def test_the_best_threshold_of_dear_is_among_them() -> None:
    """Here the whole model in one group, as by the given threshold, takes much longer."""
    specs = (TensorSpec(f"t{k}", (65_536,), "float32") for k in range(60))
    trace = Trace("even", tuple(TraceTensor(spec, 1e-4, 2e-4) for spec in specs))
    costs = Costs(LinearCost(1e-4, 8e-9))
    found = auto_candidates(trace, costs, 25 * 2**20, decouples=True)
    dear = [p for p in found if p.schedule == "dear"]
    thresholds = [round(25 * 2**20 * 2.0**k) for k in range(-5, 4)]
    wanted = min(iteration_s(make("dear", trace, costs, t), trace, costs) for t in thresholds)
    assert len(dear) == 2
    assert min(iteration_s(p, trace, costs) for p in dear) == pytest.approx(wanted)
    assert wanted < 0.95 * iteration_s(make("dear", trace, costs, 25 * 2**20), trace, costs)


def test_what_leaves_behind_backward_is_among_them() -> None:
    """Communication may cost more of backward than it hides there; only a trial can tell.

    One message leaves then anyway, with overlap too; messages of two element types do not.
    """
    for dtypes in (("float32",), ("float32", "float16")):
        specs = [TensorSpec(f"t{k}", (1000,), dtypes[k % len(dtypes)]) for k in range(4)]
        trace = Trace("even", tuple(TraceTensor(spec, 0.1, 0.1) for spec in specs))
        for decoupled in (True, False):
            costs = Costs(LinearCost(1e-3, 1e-6))
            found = auto_candidates(trace, costs, THRESHOLD_BYTES, decoupled)
            late = [p for p in found if not p.overlap or len(p.groups) == 1]
            assert [p.overlap for p in late] == [len(dtypes) == 1]
            assert not decouples(late[0])
            assert len(late[0].groups) == len(dtypes)
            assert len(late[0].groups) < max(len(p.groups) for p in found)


def large(num_tensors: int, dtypes: tuple[str, ...] = ("float32",)) -> tuple[Trace, Costs]:
    """A model of very many tensors, and a measured network that takes about as long as backward."""
    made = make_trace(num_tensors)
    rows = tuple(
        TraceTensor(replace(row.spec, dtype=dtypes[k % len(dtypes)]), row.forward_s, row.backward_s)
        for k, row in enumerate(made.tensors)
    )
    curve = make_cost("curve", made)
    assert isinstance(curve, PiecewiseCost)
    half = PiecewiseCost(tuple((size, 0.55 * seconds) for size, seconds in curve.points))
    return Trace(made.model, rows), Costs(curve, half, half)


@pytest.mark.parametrize("kappa", [0.0, 0.5])
def test_plans_of_joined_tensors_are_nearly_as_good(kappa: float) -> None:
    trace, costs = large(400)
    costs = replace(costs, kappa=kappa)
    for name in ("oasr", "ipart", "independent", "hybrid"):
        exact_s = iteration_s(planners.plan(name, trace, costs), trace, costs)
        joined = make(name, trace, costs, THRESHOLD_BYTES)
        assert joined.schedule == name
        assert iteration_s(joined, trace, costs) <= 1.005 * exact_s, name


def test_planning_for_thousands_of_tensors_hardly_holds_training_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slow planners see few tensors: exactly it would take 6 s, and four times as much for twice as
    many."""
    asked: list[tuple[str, int]] = []
    exact = planners.plan

    def plan(name: str, trace: Trace, *arguments: Any, **options: Any) -> Plan:
        asked.append((name, len(trace.tensors)))
        return exact(name, trace, *arguments, **options)

    monkeypatch.setattr(planners, "plan", plan)
    trace, costs = large(2000)
    auto_candidates(trace, costs, 25 * 2**20, decouples=True)
    slow = {name for name, entry in planners.PLANNERS.items() if entry.slow}
    assert slow & {name for name, _ in asked}
    assert all(tensors <= MAX_EXACT for name, tensors in asked if name in slow)
    assert len(asked) < 2 * len(planners.PLANNERS)

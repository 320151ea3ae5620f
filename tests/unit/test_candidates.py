"""The plan of large tensors in place and small ones together, against all of its kind."""

from __future__ import annotations

import random

import pytest

from tests.unit import reference
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.plan import Group, Plan
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace
from wfbp.runtime.candidates import apart, auto_candidates, with_packing


def test_apart_is_the_best_of_its_kind() -> None:
    rng = random.Random(4)
    counts = set()
    for _ in range(300):
        trace = reference.random_trace(rng, rng.randint(1, 9))
        raw = reference.random_cost(rng, rng.random() < 0.5)
        costs = Costs(raw.scaled(1.0 + rng.random()), in_place=raw)
        made = apart(trace, costs)
        assert not made.overlap
        found = iteration_s(made, trace, costs)
        largest = sorted(range(len(trace.specs)), key=lambda k: -trace.specs[k].nbytes)
        for count in range(len(largest)):
            groups = (*((k,) for k in largest[:count]), tuple(largest[count:]))
            other = Plan("other", trace.specs, tuple(map(Group, groups)), overlap=False)
            assert found <= iteration_s(other, trace, costs) * (1 + 1e-12)
        counts.add(len(made.groups))
    assert len(counts) > 3


def test_apart_sends_in_forward_order_and_keeps_element_types_apart() -> None:
    trace = reference.random_trace(random.Random(1), 12, ("uint8", "float32"))
    made = apart(trace, Costs(LinearCost(1.0, 1e-3), in_place=LinearCost(1e-6, 1e-3)))
    alone = [g.tensors[0] for g in made.groups if len(g.tensors) == 1]
    assert alone == sorted(alone)
    assert {made.dtype(g) for g in range(len(made.groups))} == {"uint8", "float32"}


@pytest.mark.parametrize("in_place", [False, True])
def test_costs_with_packing(in_place: bool) -> None:
    curve = PiecewiseCost(((0.0, 1.0), (100.0, 2.0)))
    costs = with_packing(Costs(curve), 0.1, in_place)
    assert costs.all_reduce(100.0) == pytest.approx(12.0)
    assert costs.in_place == (curve if in_place else None)


@pytest.mark.parametrize("in_place", [False, True])
def test_auto_tries_apart_where_gradients_may_be_written(in_place: bool) -> None:
    trace: Trace = reference.random_trace(random.Random(2), 8)
    curve = PiecewiseCost(((0.0, 1e-3), (1000.0, 2e-3)))
    plans = auto_candidates(trace, with_packing(Costs(curve), 1e-4, in_place), 100, False)
    assert any(p.schedule == "apart" for p in plans) is in_place

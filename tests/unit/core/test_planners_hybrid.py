"""Hybrid against every other planner, every choice of modes, and the bound."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.support import reference
from tests.unit.core.test_planners import TRACES, cluster
from tests.unit.core.test_planners_decoupled import random_costs
from wfbp.core.bound import lower_bound_s
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.planners.exact import exact_plan
from wfbp.core.planners.hybrid import EITHER, shared_modes
from wfbp.core.planners.partition import plan_of_phases
from wfbp.core.timeline import iteration_s, timeline
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


def check_never_worse(trace: Trace, costs: Costs) -> None:
    made = plan("hybrid", trace, costs)
    assert made.schedule == "hybrid"
    found = timeline(made, trace, costs)
    assert found.lower_bound_s <= found.iteration_s
    assert found.iteration_s >= lower_bound_s(trace, costs) * (1 - 1e-12)
    for name in PLANNERS:
        other = timeline(plan(name, trace, costs), trace, costs)
        assert other.lower_bound_s <= other.iteration_s
        assert found.iteration_s <= other.iteration_s * (1 + 1e-11), name
    for name in ("oasr", "independent"):
        exact = iteration_s(plan(name, trace, costs, tolerance=0), trace, costs)
        assert found.iteration_s <= exact * 1.0011
        shortest = iteration_s(plan("hybrid", trace, costs, tolerance=0), trace, costs)
        assert shortest <= exact * (1 + 1e-9)


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "piecewise"])
def test_never_worse_than_any_other_nor_better_than_the_bound(linear: bool) -> None:
    rng = random.Random(linear)
    for _ in range(40 if linear else 15):
        trace = reference.random_trace(rng, rng.randint(1, 25))
        check_never_worse(trace, random_costs(rng, linear, reference.random_kappa(rng)))


def test_never_worse_with_several_element_types() -> None:
    rng = random.Random(17)
    for _ in range(30):
        trace = reference.random_trace(rng, rng.randint(1, 10), dtypes=("float32", "float16"))
        costs = random_costs(rng, True)
        found = iteration_s(plan("hybrid", trace, costs), trace, costs)
        for name in PLANNERS:
            other = iteration_s(plan(name, trace, costs), trace, costs)
            assert found <= other * (1 + 1e-11), name


def best_of_shared_groups(trace: Trace, costs: Costs) -> float:
    """Every partition, each group either all-reduced or scattered and gathered as it is."""
    best = float("inf")
    for ends in reference.all_partitions(len(trace.tensors)):
        for ways in product(EITHER, repeat=len(ends)):
            forward_ends, total, start = [], 0, 0
            for end, way in zip(ends, ways, strict=True):
                if way is Operation.REDUCE_SCATTER:
                    total += end - start
                    forward_ends.append(total)
                start = end
            modes = tuple(zip(ends, ways, strict=True))
            made = plan_of_phases("hand", trace, modes, ends, forward_ends)
            best = min(best, iteration_s(made, trace, costs))
    return best


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "piecewise"])
def test_at_least_as_good_as_all_shared_groups(linear: bool) -> None:
    rng = random.Random(30 + linear)
    for _ in range(25):
        trace = reference.random_trace(rng, rng.randint(1, 5))
        costs = random_costs(rng, linear)
        best = best_of_shared_groups(trace, costs)
        made, shortest_s = exact_plan("hand", trace, costs, shared_modes(trace, costs), 0.0)
        assert shortest_s <= best * (1 + 1e-9)
        assert iteration_s(made, trace, costs) <= best * (1 + 1e-9)
        shortest = iteration_s(plan("hybrid", trace, costs, tolerance=0), trace, costs)
        assert shortest <= best * (1 + 1e-9)


def test_near_the_best_of_all_modes() -> None:
    """Every choice for every gradient: usually found, never far off."""
    rng = random.Random(50)
    ratios = []
    for _ in range(60):
        num_tensors = rng.randint(1, 7)
        trace = reference.random_trace(rng, num_tensors)
        costs = random_costs(rng, True)
        best = min(
            exact_plan("hand", trace, costs, tuple(enumerate(ways, start=1)), 0.0)[1]
            for ways in product(EITHER, repeat=num_tensors)
        )
        found = iteration_s(plan("hybrid", trace, costs, tolerance=0), trace, costs)
        ratios.append(found / best)
    assert min(ratios) > 1 - 1e-9
    assert max(ratios) < 1.02
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 0.9 * len(ratios)


def test_all_reduces_where_that_is_cheaper_than_its_halves() -> None:
    rng = random.Random(3)
    trace = reference.random_trace(rng, 12)
    whole = LinearCost(0.05, 1e-3)
    dear_halves = Costs(whole, whole, whole)
    made = plan("hybrid", trace, dear_halves)
    assert {g.operation for g in made.groups} == {Operation.ALL_REDUCE}
    free_gather = Costs(whole, whole.scaled(0.5), LinearCost(0.0, 0.0))
    made = plan("hybrid", trace, free_gather)
    assert Operation.ALL_REDUCE not in {g.operation for g in made.groups}


def test_measured_curves_on_a_large_model() -> None:
    trace = Trace.load(next(path for path in TRACES if path.stem == "inception-v4"))
    line = cluster("10GbE-64").all_reduce
    curve = PiecewiseCost(tuple((4.0 * 4**k, line(4.0 * 4**k)) for k in range(14)))
    exact = iteration_s(plan("hybrid", trace, Costs(line)), trace, Costs(line))
    found = iteration_s(plan("hybrid", trace, Costs(curve)), trace, Costs(line))
    assert found == pytest.approx(exact, rel=5e-3)

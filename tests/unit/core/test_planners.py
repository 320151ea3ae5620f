"""What every planner owes, and the rules of those that follow one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.support import reference
from wfbp.cli.inputs import EXAMPLE_TRACES
from wfbp.core.bound import lower_bound_s
from wfbp.core.cost import CostModel, Costs, LinearCost
from wfbp.core.planners import ALL_REDUCE_SCHEDULES as ALL_REDUCE
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec

DECOUPLED = ("ps", "ps_layerwise", "ipart", "dear", "independent")
DATA = Path(__file__).parents[2] / "data"
TRACES = sorted(EXAMPLE_TRACES.glob("*.json"))


def cluster(name: str) -> Costs:
    clusters = json.loads((DATA / "clusters.json").read_text())["clusters"]
    row = next(c for c in clusters if c["name"] == name)
    return Costs(LinearCost(row["alpha_s"], row["beta_s_per_byte"]))


def uniform(num_tensors: int, gap_s: float) -> Trace:
    rows = (
        TraceTensor(TensorSpec(f"t{k}", (100,), "float32"), 0.0, gap_s) for k in range(num_tensors)
    )
    return Trace("uniform", tuple(rows))


def test_registry_names() -> None:
    assert list(PLANNERS) == [*ALL_REDUCE, *DECOUPLED, "hybrid"]
    for name, entry in PLANNERS.items():
        options = {"threshold_bytes": 100} if entry.takes_threshold else {}
        trace, costs = uniform(9, 1.0), Costs(LinearCost(2.0, 1e-3))
        made = entry.planner(trace, costs, **options)
        assert made.schedule == name
        assert entry.decouples or not made.decoupled
        other = entry.planner(uniform(9, 0.1), Costs(LinearCost(0.1, 1e-2)), **options)
        assert entry.measures or made == other


def test_unknown_schedule_lists_the_known() -> None:
    trace = uniform(2, 1.0)
    with pytest.raises(
        ValueError,
        match="'best'; expected one of layerwise, single, threshold, mgwfbp, oasr, ps",
    ):
        plan("best", trace, Costs(LinearCost(1.0, 0.0)))


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="threshold_bytes"):
        plan("layerwise", uniform(2, 1.0), Costs(LinearCost(1.0, 0.0)), threshold_bytes=1)


@pytest.mark.parametrize("schedule", ALL_REDUCE)
def test_every_planner_covers_all_tensors_in_backward_order(schedule: str) -> None:
    rng = random.Random(4)
    for _ in range(60):
        trace = reference.random_trace(rng, rng.randint(1, 30))
        costs = Costs(reference.random_cost(rng, rng.random() < 0.5), None, None, 0.0)
        made = plan(schedule, trace, costs)
        assert made.schedule == schedule
        assert made.overlap
        sent = [k for group in made.groups for k in group.tensors]
        assert sent == list(range(len(trace.tensors) - 1, -1, -1))


@pytest.mark.parametrize("schedule", PLANNERS)
def test_every_planner_splits_element_types(schedule: str) -> None:
    rng = random.Random(6)
    for _ in range(20):
        trace = reference.random_trace(rng, 12, dtypes=("float32", "float16", "float64"))
        made = plan(schedule, trace, Costs(reference.random_cost(rng, True)))
        backward = made.groups[: made.num_backward]
        assert sorted(k for group in backward for k in group.tensors) == list(range(12))


def test_no_plan_beats_the_lower_bound_nor_the_optimum() -> None:
    rng = random.Random(9)
    for _ in range(400):
        trace = reference.random_trace(rng, rng.randint(1, 25))
        cost = reference.random_cost(rng, rng.random() < 0.5)
        costs = Costs(cost, kappa=reference.random_kappa(rng))
        options = {"threshold": {"threshold_bytes": rng.randint(1, 1500)}}
        optimum = timeline(plan("oasr", trace, costs, tolerance=0), trace, costs).iteration_s
        for schedule in ALL_REDUCE:
            made = plan(schedule, trace, costs, **options.get(schedule, {}))
            found = timeline(made, trace, costs)
            assert found.lower_bound_s <= found.iteration_s
            assert found.iteration_s >= lower_bound_s(trace, costs) * (1 - 1e-12)
            assert found.iteration_s >= optimum * (1 - 2e-10)


@pytest.mark.parametrize("x", [1, 40, 399, 400, 401, 10**9])
def test_threshold_closes_a_group_once_it_holds_enough(x: int) -> None:
    rng = random.Random(x)
    for _ in range(30):
        trace = reference.random_trace(rng, 15)
        costs = Costs(LinearCost(1.0, 0.0))
        made = plan("threshold", trace, costs, threshold_bytes=x)
        sizes = [[trace.tensors[k].spec.nbytes for k in g.tensors] for g in made.groups]
        assert all(sum(group) >= x for group in sizes[:-1])
        assert all(sum(group[:-1]) < x for group in sizes)


@pytest.mark.parametrize("x", [0, -1, float("nan")])
def test_threshold_must_be_positive(x: float) -> None:
    with pytest.raises(ValueError, match="threshold_bytes: expected at least 1"):
        plan("threshold", uniform(2, 1.0), Costs(LinearCost(1.0, 0.0)), threshold_bytes=x)


def merged_by_the_published_rule(
    sizes: list[int], ready: list[float], cost: CostModel
) -> tuple[int, ...]:
    """The rule as the paper states it: after every merge all start times are worked out again.

    A merged message lies at the last tensor of it; those before carry no bytes and cost nothing.
    """
    num_tensors = len(sizes)
    held = list(sizes)
    seconds = [cost(m) for m in sizes]

    def starts() -> list[float]:
        at = [ready[0]]
        for k in range(1, num_tensors):
            at.append(max(at[k - 1] + seconds[k - 1], ready[k]))
        return at

    ends = []
    for k in range(num_tensors - 1):
        start = starts()[k]
        if ready[k + 1] < start + seconds[k] and (
            start > ready[k + 1] or ready[k + 1] - start < cost(0)
        ):
            held[k + 1] += held[k]
            held[k], seconds[k] = 0, 0.0
            seconds[k + 1] = cost(held[k + 1])
        else:
            ends.append(k + 1)
    return (*ends, num_tensors)


def test_mgwfbp_equals_the_published_rule() -> None:
    rng = random.Random(31)
    for _ in range(1500):
        trace = reference.random_trace(rng, rng.randint(1, 14))
        cost = reference.random_cost(rng, rng.random() < 0.7)
        made = plan("mgwfbp", trace, Costs(cost))
        expected = merged_by_the_published_rule(trace.backward_bytes, trace.ready_times_s, cost)
        assert reference.ends_of(made) == expected


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_mgwfbp_equals_the_published_rule_on_real_models(path: Path) -> None:
    trace, costs = Trace.load(path), cluster("10GbE-64")
    expected = merged_by_the_published_rule(
        trace.backward_bytes, trace.ready_times_s, costs.all_reduce
    )
    assert reference.ends_of(plan("mgwfbp", trace, costs)) == expected


@pytest.mark.parametrize(("gap_s", "groups"), [(0.99, 1), (1.0, 2), (1.05, 2)])
def test_mgwfbp_merges_where_the_wait_is_under_a_start_up(gap_s: float, groups: int) -> None:
    costs = Costs(LinearCost(1.0, 1.0 / 400))  # the first message would end after 2 s
    assert len(plan("mgwfbp", uniform(2, gap_s), costs).groups) == groups


def test_mgwfbp_collapses_equal_tensors_into_one_message() -> None:
    # n gradients, each 0.99 alpha after the last: every pair looks worth merging.
    alpha = 1.0
    trace = uniform(64, 0.99 * alpha)
    costs = Costs(LinearCost(alpha, 0.7 * alpha / 400))
    merged = plan("mgwfbp", trace, costs)
    assert len(merged.groups) == 1
    exact = timeline(plan("oasr", trace, costs), trace, costs).iteration_s
    assert 1.5 < timeline(merged, trace, costs).iteration_s / exact < 1.8


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_real_models_come_near_the_bound_with_few_groups(path: Path) -> None:
    trace = Trace.load(path)
    for name in ("10GbE-16", "10GbE-64", "IB-64"):
        costs = cluster(name)
        exact = timeline(plan("oasr", trace, costs), trace, costs)
        assert lower_bound_s(trace, costs) <= exact.iteration_s * (1 + 1e-12)
        assert 1.0 <= exact.ratio_to_lower_bound < 1.35
        assert len(exact.groups) <= 20


@pytest.mark.parametrize("tolerance", [-1e-3, float("nan"), float("inf")])
@pytest.mark.parametrize("schedule", ["oasr", "hybrid", "independent"])
def test_tolerance_must_be_a_finite_number(schedule: str, tolerance: float) -> None:
    costs = Costs(LinearCost(1.0, 0.0))
    with pytest.raises(ValueError, match=r"tolerance: (expected a finite|too large)"):
        plan(schedule, uniform(3, 1.0), costs, tolerance=tolerance)

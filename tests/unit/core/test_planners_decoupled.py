"""Planners that scatter in backward and gather in forward: exactness, and the published rules."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.benchmarks.validation.ratios import dear_search
from tests.support import reference
from tests.unit.core.test_planners import DECOUPLED, uniform
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.plan import Plan
from wfbp.core.planners import plan
from wfbp.core.planners.baselines import ipart
from wfbp.core.planners.partition import plan_of_phases
from wfbp.core.timeline import iteration_s, timeline
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import Operation, Phase, TensorSpec


def random_costs(rng: random.Random, linear: bool, kappa: float = 0.0) -> Costs:
    """Costs whose halves are given or not."""
    whole = reference.random_cost(rng, linear)
    if rng.random() < 0.5:
        return Costs(whole, kappa=kappa)
    halves = (reference.random_cost(rng, linear).scaled(0.5) for _ in range(2))
    return Costs(whole, *halves, kappa=kappa)


def decoupled(trace: Trace, backward: tuple[int, ...], forward: tuple[int, ...]) -> Plan:
    modes = ((len(trace.tensors), Operation.REDUCE_SCATTER),)
    return plan_of_phases("hand", trace, modes, backward, forward)


@pytest.mark.parametrize("schedule", DECOUPLED)
def test_everything_is_scattered_in_backward_order_and_gathered_in_forward_order(
    schedule: str,
) -> None:
    rng = random.Random(4)
    for _ in range(40):
        trace = reference.random_trace(rng, rng.randint(1, 30))
        made = plan(schedule, trace, random_costs(rng, rng.random() < 0.5))
        assert made.schedule == schedule
        sent = {
            phase: [k for g in made.groups if g.phase is phase for k in g.tensors]
            for phase in Phase
        }
        forward_order = list(range(len(trace.tensors)))
        assert sent[Phase.BACKWARD] == forward_order[::-1]
        assert sent[Phase.FORWARD] == forward_order
        assert {g.operation for g in made.groups} == {
            Operation.REDUCE_SCATTER,
            Operation.ALL_GATHER,
        }


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "piecewise"])
@pytest.mark.parametrize("num_tensors", [1, 2, 4, 5])
def test_independent_equals_brute_force_on_both_sides(num_tensors: int, linear: bool) -> None:
    rng = random.Random(10 * num_tensors + linear)
    partitions = list(reference.all_partitions(num_tensors))
    for _ in range(12):
        trace = reference.random_trace(rng, num_tensors)
        costs = random_costs(rng, linear, reference.random_kappa(rng))
        best = min(
            iteration_s(decoupled(trace, backward, forward), trace, costs)
            for backward in partitions
            for forward in partitions
        )
        exact = iteration_s(plan("independent", trace, costs, tolerance=0), trace, costs)
        assert exact == pytest.approx(best, rel=1e-9, abs=0)
        chosen = iteration_s(plan("independent", trace, costs), trace, costs)
        assert chosen <= best * (1 + 1e-3 + 1e-9)


def test_dear_shares_its_groups_between_the_phases() -> None:
    rng = random.Random(5)
    for _ in range(40):
        trace = reference.random_trace(rng, 15)
        costs = random_costs(rng, True)
        size = rng.choice([1, 300, 2000])
        made = plan("dear", trace, costs, threshold_bytes=size)
        scattered = [g.tensors for g in made.groups if g.phase is Phase.BACKWARD]
        gathered = [g.tensors for g in made.groups if g.phase is Phase.FORWARD]
        assert gathered == [members[::-1] for members in reversed(scattered)]
        reduced = plan("threshold", trace, costs, threshold_bytes=size)
        assert scattered == [g.tensors for g in reduced.groups]
    with pytest.raises(ValueError, match="threshold_bytes: expected at least 1"):
        plan("dear", uniform(2, 1.0), Costs(LinearCost(1.0, 0.0)), threshold_bytes=0)


def test_dear_search_beats_its_default_and_repeats_itself() -> None:
    pytest.importorskip("bayes_opt")
    specs = (TensorSpec(f"t{k}", (2**20,), "float32") for k in range(40))
    trace = Trace("even", tuple(TraceTensor(spec, 2e-3, 4e-3) for spec in specs))
    costs = Costs(LinearCost(1e-3, 1e-9))
    found = dear_search(trace, costs, 8)
    default = plan("dear", trace, costs)
    assert found.schedule == "dear"
    assert iteration_s(found, trace, costs) < 0.97 * iteration_s(default, trace, costs)
    assert dear_search(trace, costs, 2) == dear_search(trace, costs, 2)
    assert dear_search(trace, costs, 1) == default


def test_ipart_by_hand() -> None:
    # Transfers of 10 bytes take 1 s, forward 1.4 s a tensor. With 2 tensors first (2 s exposed),
    # 2.8 s hide the next two, and so on; with 1 first, 1 and so on: 1 s exposed, the best.
    specs = (TensorSpec(f"t{k}", (10,), "uint8") for k in range(4))
    trace = Trace("t", tuple(TraceTensor(spec, 1.4, 100.0) for spec in specs))
    costs = Costs(LinearCost(9.0, 9.0), LinearCost(0.0, 0.1), LinearCost(0.0, 0.1))
    gathers = [g.tensors for g in ipart(trace, costs).groups if g.phase is Phase.FORWARD]
    assert gathers == [(0,), (1,), (2,), (3,)]
    slow_start = Costs(LinearCost(9.0, 9.0), LinearCost(0.0, 0.1), LinearCost(1.5, 0.01))
    gathers = [g.tensors for g in ipart(trace, slow_start).groups if g.phase is Phase.FORWARD]
    assert gathers == [(0, 1), (2, 3)]


def test_every_partition_of_ipart_hides_under_its_neighbour_or_is_one_tensor() -> None:
    rng = random.Random(2)
    for _ in range(100):
        trace = reference.random_trace(rng, 20)
        costs = random_costs(rng, rng.random() < 0.5)
        made = ipart(trace, costs)
        for phase, operation, compute in (
            (Phase.FORWARD, Operation.ALL_GATHER, [t.forward_s for t in trace.tensors]),
            (Phase.BACKWARD, Operation.REDUCE_SCATTER, [t.backward_s for t in trace.tensors]),
        ):
            runs = sorted(sorted(g.tensors) for g in made.groups if g.phase is phase)
            for current, following in pairwise(runs):
                nbytes = sum(trace.tensors[k].spec.nbytes for k in following)
                hidden_s = sum(compute[k] for k in current)
                fits = costs.of(operation)(nbytes) <= hidden_s * (1 + 1e-12)
                assert fits or len(following) == 1


def test_overlap_pays_at_72_nodes() -> None:
    """A parameter server without overlap, layer by layer, and by greedy partitions."""
    trace = uniform(50, 0.02)
    trace = Trace("t", tuple(TraceTensor(t.spec, 0.01, t.backward_s) for t in trace.tensors))
    costs = Costs(LinearCost(0.02, 2e-5))
    whole, layers, greedy = (
        timeline(plan(name, trace, costs), trace, costs).iteration_s
        for name in ("ps", "ps_layerwise", "ipart")
    )
    assert greedy < layers < whole

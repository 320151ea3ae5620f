"""The simulator against the closed form, and its records against what must hold of any schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.support import reference
from tests.support.simulation import Simulation, simulate
from tests.unit.core.test_planners import TRACES, cluster
from tests.unit.core.test_planners_decoupled import random_costs
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.plan import Group, Plan
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import Operation, Phase, TensorSpec


def random_plan(rng: random.Random, trace: Trace) -> Plan:
    """Groups in any order, of any mode; gathers in any order."""
    order = list(range(len(trace.tensors)))
    if rng.random() < 0.5:
        order.reverse()
    else:
        rng.shuffle(order)
    groups = [
        Group(members, rng.choice([Operation.ALL_REDUCE, Operation.REDUCE_SCATTER]))
        for members in cut(rng, order)
    ]
    gathered = [k for g in groups if g.operation is Operation.REDUCE_SCATTER for k in g.tensors]
    rng.shuffle(gathered)
    gathers = (Group(m, Operation.ALL_GATHER) for m in cut(rng, gathered))
    return Plan("any", trace.specs, (*groups, *gathers), overlap=rng.random() < 0.8)


def cut(rng: random.Random, row: list[int]) -> list[tuple[int, ...]]:
    borders = [k for k in range(1, len(row)) if rng.random() < 0.5]
    return [tuple(row[a:b]) for a, b in pairwise([0, *borders, len(row)]) if b > a]


def check_against_timeline(found: Simulation, trace: Trace, costs: Costs) -> None:
    made = found.plan
    predicted = timeline(made, trace, costs)
    for iteration in found.iterations[1:]:
        assert iteration.seconds == pytest.approx(predicted.iteration_s, rel=1e-9, abs=1e-12)
    before, last = found.iterations[-2:]
    origin_s = next(s.start_s for s in before.compute if s.phase is Phase.BACKWARD)
    gathers = len(made.groups) - made.num_backward
    messages = before.messages[gathers:] + last.messages[:gathers]
    assert [m.group for m in messages] == list(range(len(made.groups)))
    for message, group in zip(messages, predicted.groups, strict=True):
        for at, expected in (
            (message.ready_s, group.ready_s),
            (message.start_s, group.start_s),
            (message.end_s, group.end_s),
        ):
            assert at - origin_s == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert message.nbytes == group.nbytes
    ends = [s.end_s for s in before.compute if s.phase is Phase.BACKWARD]
    assert ends[-1] - origin_s == pytest.approx(predicted.backward_end_s, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("schedule", PLANNERS)
def test_agrees_with_every_planners_prediction(schedule: str) -> None:
    rng = random.Random(schedule)
    for _ in range(25):
        trace = reference.random_trace(rng, rng.randint(1, 12))
        costs = random_costs(rng, rng.random() < 0.5)
        made = plan(schedule, trace, costs)
        check_against_timeline(simulate(made, trace, costs, iterations=3), trace, costs)


@pytest.mark.parametrize("kappa", [0.0, 0.4, 2.0])
def test_agrees_on_any_plan_with_interference_too(kappa: float) -> None:
    rng = random.Random(int(10 * kappa))
    for _ in range(150):
        trace = reference.random_trace(rng, rng.randint(1, 9))
        costs = random_costs(rng, rng.random() < 0.5, kappa)
        made = random_plan(rng, trace)
        check_against_timeline(simulate(made, trace, costs), trace, costs)


@pytest.mark.parametrize("schedule", ["mgwfbp", "ps_layerwise", "hybrid"])
def test_agrees_on_real_models(schedule: str) -> None:
    for path in TRACES:
        trace, costs = Trace.load(path), cluster("10GbE-64")
        made = plan(schedule, trace, costs)
        found = simulate(made, trace, costs, iterations=2)
        expected = timeline(made, trace, costs).iteration_s
        assert found.iteration_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_what_holds_of_any_schedule(channels: int) -> None:
    rng = random.Random(channels)
    for _ in range(100):
        trace = reference.random_trace(rng, rng.randint(1, 9))
        costs = random_costs(rng, rng.random() < 0.5, reference.random_kappa(rng))
        made = random_plan(rng, trace)
        found = simulate(made, trace, costs, iterations=3, channels=channels)
        messages = [m for iteration in found.iterations for m in iteration.messages]
        for message in messages:
            cost_s = costs.of(made.groups[message.group].operation)(message.nbytes)
            assert message.end_s == message.start_s + cost_s
            assert message.ready_s <= message.start_s + 1e-12
            under_way = sum(
                m.start_s <= message.start_s < m.end_s for m in messages if m is not message
            )
            assert under_way < channels or message.start_s == message.end_s
        for before, after in pairwise(found.iterations):
            assert before.end_s == after.start_s
            check_border(made, after.compute, after.messages)
        for iteration in found.iterations:
            assert len(iteration.compute) == 2 * len(trace.tensors)
            for one, other in pairwise(iteration.compute):
                assert one.end_s <= other.start_s


def check_border(made: Plan, compute: tuple, messages: tuple) -> None:
    """No tensor is used before its gather has arrived, none is sent before it exists."""
    used = {s.tensor: s.start_s for s in compute if s.phase is Phase.FORWARD}
    exists = {s.tensor: s.end_s for s in compute if s.phase is Phase.BACKWARD}
    for message in messages:
        group = made.groups[message.group]
        for k in group.tensors:
            if group.phase is Phase.FORWARD:
                assert message.end_s <= used[k]
            else:
                assert message.start_s >= exists[k]


def test_a_second_channel_helps_where_messages_queue() -> None:
    trace = Trace(
        "t",
        tuple(TraceTensor(TensorSpec(f"t{k}", (10,), "uint8"), 0.0, 0.0) for k in range(4)),
    )
    costs = Costs(LinearCost(1.0, 0.0))
    made = plan("layerwise", trace, costs)
    times = [simulate(made, trace, costs, channels=n).iteration_s for n in (1, 2, 4)]
    assert times == [4.0, 2.0, 1.0]


def test_first_iteration_has_nothing_to_gather() -> None:
    trace = reference.random_trace(random.Random(1), 6)
    costs = Costs(LinearCost(0.1, 1e-3))
    made = plan("independent", trace, costs)
    first, second = simulate(made, trace, costs, iterations=2).iterations
    assert {m.group for m in first.messages} == set(range(made.num_backward))
    assert {m.group for m in second.messages} == set(range(len(made.groups)))
    assert first.seconds < second.seconds


def test_bad_arguments() -> None:
    trace = reference.random_trace(random.Random(1), 3)
    costs = Costs(LinearCost(0.1, 1e-3))
    made = plan("layerwise", trace, costs)
    with pytest.raises(ValueError, match="iterations: expected at least 2, found 1"):
        simulate(made, trace, costs, iterations=1)
    with pytest.raises(ValueError, match="window is 0; expected at least 1"):
        simulate(made, trace, costs, channels=0)
    shorter = replace(trace, tensors=trace.tensors[:2])
    with pytest.raises(ValueError, match="the plan is of 3 tensors, the trace of 2"):
        simulate(made, shorter, costs)

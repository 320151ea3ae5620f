"""The prediction of an iteration by hand, and against a simulation event by event."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.support import reference
from tests.support.simulation import simulate
from tests.unit.core.test_planners_decoupled import random_costs
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.plan import Group, Plan
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.timeline import iteration_s, timeline
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import Operation, TensorSpec


def small_trace() -> Trace:
    """Ready at 1, 3 and 4 seconds, 10 bytes each; forward takes 3 s, the rest 0.5 s."""
    rows = (("a", 1.0), ("b", 2.0), ("c", 1.0))
    return Trace(
        "small",
        tuple(TraceTensor(TensorSpec(name, (10,), "uint8"), 1.0, b) for name, b in rows),
        other_s=0.5,
    )


def test_by_hand() -> None:
    trace, costs = small_trace(), Costs(LinearCost(1.0, 0.1))
    found = timeline(plan("layerwise", trace, costs), trace, costs)
    assert [(g.ready_s, g.start_s, g.end_s, g.nbytes) for g in found.groups] == [
        (1.0, 1.0, 3.0, 10),
        (3.0, 3.0, 5.0, 10),
        (4.0, 5.0, 7.0, 10),
    ]
    assert found.backward_end_s == 4.0
    assert found.iteration_s == 3.0 + 7.0 + 0.5
    assert found.exposed_s == 3.0
    assert found.ratio_to_lower_bound == found.iteration_s / found.lower_bound_s


def test_by_hand_under_interference() -> None:
    # The first message takes 2 s, in which backward does 1 s: b is ready at 4 instead of 3.
    trace, costs = small_trace(), Costs(LinearCost(1.0, 0.1), kappa=1.0)
    found = timeline(plan("layerwise", trace, costs), trace, costs)
    assert [(g.ready_s, g.start_s, g.end_s) for g in found.groups] == [
        (1.0, 1.0, 3.0),
        (4.0, 4.0, 6.0),
        (6.0, 6.0, 8.0),
    ]
    assert found.backward_end_s == 6.0
    assert found.iteration_s == 11.5
    assert found.exposed_s == 4.0
    assert [g.exposed_s for g in found.groups] == [0.0, 0.0, 2.0]


def test_interference_never_helps() -> None:
    rng = random.Random(2)
    for _ in range(100):
        trace = reference.random_trace(rng, 8)
        costs = Costs(reference.random_cost(rng, False))
        made = plan("layerwise", trace, costs)
        times = [iteration_s(made, trace, replace(costs, kappa=k)) for k in (0.0, 0.3, 1.0, 3.0)]
        assert all(a <= b + 1e-12 for a, b in pairwise(times))


def test_free_network_and_no_time_at_all() -> None:
    nothing = Trace("zero", (TraceTensor(TensorSpec("a", (1,), "uint8"), 0.0, 0.0),))
    costs = Costs(LinearCost(0.0, 0.0))
    assert timeline(plan("single", nothing, costs), nothing, costs).ratio_to_lower_bound == 1.0


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ((("a", 10),), "the plan is of 1 tensor, the trace of 3"),
        (
            (("a", 10), ("b", 11), ("c", 10)),
            "tensor 1 is 'b' of 11 bytes in the plan, 'b' of 10 in the trace",
        ),
    ],
)
def test_plan_of_other_tensors(specs: tuple[tuple[str, int], ...], message: str) -> None:
    tensors = tuple(TensorSpec(name, (n,), "uint8") for name, n in specs)
    other = Plan("hand", tensors, (Group(tuple(range(len(specs)))),))
    with pytest.raises(ValueError, match=message):
        timeline(other, small_trace(), Costs(LinearCost(1.0, 0.0)))


def test_shapes_of_equal_size_are_the_same_tensors() -> None:
    trace = small_trace()
    shaped = tuple(TensorSpec(s.name, (5, 2), s.dtype) for s in trace.specs)
    made = Plan("hand", shaped, (Group((2, 1, 0)),))
    assert iteration_s(made, trace, Costs(LinearCost(1.0, 0.0))) == 3.0 + 5.0 + 0.5


def decoupled(trace: Trace, gathers: tuple[tuple[int, ...], ...]) -> Plan:
    scatter = Group((2, 1, 0), Operation.REDUCE_SCATTER)
    groups = (Group(members, Operation.ALL_GATHER) for members in gathers)
    return Plan("hand", trace.specs, (scatter, *groups))


def test_decoupled_by_hand() -> None:
    # The scatter leaves at 4 and takes 2 s. Gathers of 1 and 2 s follow after 0.5 s of other
    # work; a starts at 7.5, b and c are there at 9.5, the end is 2 s later.
    trace = small_trace()
    costs = Costs(LinearCost(9.0, 9.0), LinearCost(2.0, 0.0), LinearCost(0.0, 0.1))
    found = timeline(decoupled(trace, ((0,), (1, 2))), trace, costs)
    assert [(g.ready_s, g.start_s, g.end_s, g.nbytes) for g in found.groups] == [
        (4.0, 4.0, 6.0, 30),
        (6.5, 6.5, 7.5, 10),
        (6.5, 7.5, 9.5, 20),
    ]
    assert found.backward_end_s == 4.0
    assert found.iteration_s == 11.5
    assert found.exposed_s == 4.0
    assert [g.exposed_s for g in found.groups] == [2.0, 1.0, 1.0]


def test_decoupled_by_hand_under_interference() -> None:
    # In forward a waits until 1, does 1 s in the 2 s until 3, then b and c go undisturbed.
    trace = small_trace()
    costs = Costs(LinearCost(9.0, 9.0), LinearCost(2.0, 0.0), LinearCost(0.0, 0.1), kappa=1.0)
    found = timeline(decoupled(trace, ((0,), (1, 2))), trace, costs)
    assert found.iteration_s == 6.0 + 0.5 + 5.0
    assert [g.exposed_s for g in found.groups] == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("schedule", PLANNERS)
def test_exposed_messages_add_up(schedule: str) -> None:
    rng = random.Random(schedule)
    for _ in range(20):
        trace = reference.random_trace(rng, rng.randint(1, 12))
        costs = Costs(LinearCost(rng.uniform(0, 2), rng.uniform(0, 1e-2)))
        found = timeline(plan(schedule, trace, costs), trace, costs)
        assert sum(g.exposed_s for g in found.groups) == pytest.approx(found.exposed_s, abs=1e-9)


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


def check_against_events(made: Plan, trace: Trace, costs: Costs) -> None:
    """The prediction is what a simulation finds, event by event."""
    iterations = simulate(made, trace, costs)
    predicted = timeline(made, trace, costs)
    assert iteration_s(made, trace, costs) == predicted.iteration_s
    for iteration in iterations[1:]:
        took_s = iteration.end_s - iteration.start_s
        assert took_s == pytest.approx(predicted.iteration_s, rel=1e-9, abs=1e-12)
    before, last = iterations[-2:]
    origin_s = before.backward_start_s
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
    ended_s = before.backward_end_s - origin_s
    assert ended_s == pytest.approx(predicted.backward_end_s, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kappa", [0.0, 0.4, 2.0])
def test_any_plan_by_events(kappa: float) -> None:
    rng = random.Random(int(10 * kappa))
    for _ in range(150):
        trace = reference.random_trace(rng, rng.randint(1, 9))
        costs = random_costs(rng, rng.random() < 0.5, kappa)
        check_against_events(random_plan(rng, trace), trace, costs)

"""The prediction of any plan against a simulation, event by event."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.support import reference
from tests.support.simulation import simulate
from tests.unit.core.test_planners_decoupled import random_costs
from wfbp.core.cost import Costs
from wfbp.core.plan import Group, Plan
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace
from wfbp.core.types import Operation


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


def check_against_timeline(made: Plan, trace: Trace, costs: Costs) -> None:
    iterations = simulate(made, trace, costs)
    predicted = timeline(made, trace, costs)
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
def test_any_plan(kappa: float) -> None:
    rng = random.Random(int(10 * kappa))
    for _ in range(150):
        trace = reference.random_trace(rng, rng.randint(1, 9))
        costs = random_costs(rng, rng.random() < 0.5, kappa)
        check_against_timeline(random_plan(rng, trace), trace, costs)

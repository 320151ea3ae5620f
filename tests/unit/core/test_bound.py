"""The lower bound against everything that might beat it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support import reference
from wfbp.core.bound import lower_bound_s
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec


def test_formula_for_linear_cost() -> None:
    rng = random.Random(1)
    for _ in range(300):
        trace = reference.random_trace(rng, rng.randint(1, 12))
        alpha, beta = rng.random(), rng.random() * 1e-2
        rows = trace.tensors
        candidates = [sum(t.forward_s + t.backward_s for t in rows)]
        for i in range(len(rows)):
            compute = sum(t.forward_s + t.backward_s for t in rows[i:])
            nbytes = sum(t.spec.nbytes for t in rows[: i + 1])
            candidates.append(compute + alpha + beta * nbytes)
        expected = max(candidates) + trace.other_s
        assert lower_bound_s(trace, Costs(LinearCost(alpha, beta))) == pytest.approx(
            expected, rel=1e-12
        )


@pytest.mark.parametrize("linear", [True, False], ids=["linear", "piecewise"])
def test_no_partition_beats_it(linear: bool) -> None:
    rng = random.Random(3)
    closest = np.inf
    for _ in range(500):
        trace = reference.random_trace(rng, rng.randint(1, 8))
        cost = reference.random_cost(rng, linear)
        kappa = reference.random_kappa(rng)
        finish, _ = reference.finishes(trace.ready_times_s, trace.backward_bytes, cost, kappa)
        best = finish.min() + reference.fixed_s(trace)
        bound = lower_bound_s(trace, Costs(cost, kappa=kappa))
        assert bound <= best * (1 + 1e-12)
        closest = min(closest, best / bound)
    assert closest < 1 + 1e-9  # it is met, so it is not just any low figure


def test_no_decoupled_schedule_beats_it_on_one_tensor() -> None:
    trace = Trace("one", (TraceTensor(TensorSpec("w", (1000,), "uint8"), 1.0, 2.0),))
    all_reduce, scatter, gather = (LinearCost(a, b) for a, b in ((5, 1e-3), (1, 2e-3), (2, 3e-3)))
    decoupled = 1.0 + 2.0 + scatter(1000) + gather(1000)
    reduced = 1.0 + 2.0 + all_reduce(1000)
    bound = lower_bound_s(trace, Costs(all_reduce, scatter, gather))
    assert bound <= min(decoupled, reduced)
    # Decoupling in halves costs what all-reduce does, and the bound stays the same.
    halves = Costs(all_reduce, all_reduce.scaled(0.5), all_reduce.scaled(0.5))
    assert lower_bound_s(trace, halves) == pytest.approx(lower_bound_s(trace, Costs(all_reduce)))


def test_a_cheaper_decoupled_way_lowers_it() -> None:
    trace = Trace("one", (TraceTensor(TensorSpec("w", (1000,), "uint8"), 1.0, 2.0),))
    all_reduce = LinearCost(1.0, 1e-3)
    cheap = LinearCost(0.1, 1e-4)
    assert lower_bound_s(trace, Costs(all_reduce)) == pytest.approx(5.0)
    assert lower_bound_s(trace, Costs(all_reduce, cheap, cheap)) == pytest.approx(3.4)


def test_lines_below_hold_for_messages_of_any_number_and_size() -> None:
    rng = random.Random(10)
    for _ in range(300):
        cost = reference.random_cost(rng, False)
        total = rng.choice([1.0, 500.0, 3000.0, 20000.0])
        sizes = [rng.random() * total for _ in range(rng.randint(1, 5))]
        least = max(a + b * sum(sizes) for a, b in cost.lines_below(total))
        assert least <= sum(cost(m) for m in sizes) * (1 + 1e-12)
        assert all(a >= 0 and b >= 0 for a, b in cost.lines_below(total))

"""Successive elimination: the least wins, and neither drift nor a disturbed round decides."""

from __future__ import annotations

import math
import random

from hypothesis import assume, given
from hypothesis import strategies as st

from wfbp.core.elimination import Rule, SuccessiveElimination

seconds = st.floats(1e-3, 10.0)
alternatives = st.lists(seconds, min_size=1, max_size=8)


def run(
    comparison: SuccessiveElimination, times_s: list[float], factors: dict[tuple[int, int], float]
) -> int:
    """Rounds until it is over; ``factors`` disturb an alternative (-1: all) in a round."""
    for number in range(100):
        here = []
        for k in comparison.alive:
            factor = factors.get((k, number), 1.0) * factors.get((-1, number), 1.0)
            here.append([times_s[k] * factor] * 2)
        if comparison.add(here):
            return number + 1
    raise AssertionError("it never ends")


@given(alternatives)
def test_without_noise_the_least_is_found_at_once(times_s: list[float]) -> None:
    comparison = SuccessiveElimination(len(times_s))
    assert run(comparison, times_s, {}) <= Rule().least_rounds
    assert math.isclose(times_s[comparison.best], min(times_s), rel_tol=1e-12)  # ties by rounding
    assert comparison.best in comparison.equal
    limit_s = min(times_s) * math.exp(Rule().margin) * (1 + 1e-9)
    assert all(times_s[k] <= limit_s for k in comparison.equal)


def test_noise_that_hides_a_difference_drops_nothing() -> None:
    """Nor does a difference within the margin, however sure it is."""
    comparison = SuccessiveElimination(3)
    for slower in (0.8, 1.05, 1.3):
        comparison.add([[1.0], [slower], [1.01]])
    assert comparison.alive == [0, 1, 2]


@given(
    alternatives, st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]), min_size=14, max_size=14)
)
def test_what_slows_all_alike_changes_nothing(times_s: list[float], slow: list[float]) -> None:
    ratios = (math.log(one / other) for one in times_s for other in times_s)
    limits = (math.log(Rule().hopeless), Rule().margin)
    # A ratio on the very limit falls to either side of it by rounding.
    assume(not any(math.isclose(ratio, limit) for ratio in ratios for limit in limits))
    undisturbed, comparison = (SuccessiveElimination(len(times_s)) for _ in range(2))
    rounds = run(undisturbed, times_s, {})
    factors = {(-1, number): factor for number, factor in enumerate(slow)}
    assert run(comparison, times_s, factors) == rounds
    assert comparison.alive == undisturbed.alive


@given(
    alternatives.filter(lambda times_s: len(times_s) > 1),
    st.integers(0, 2),
    st.floats(1.0, 1.45),
    st.integers(0, 7),
)
def test_one_disturbed_round_is_outvoted(
    times_s: list[float], number: int, factor: float, which: int
) -> None:
    which %= len(times_s)
    comparison = SuccessiveElimination(len(times_s))
    run(comparison, times_s, {(which, number): factor})
    assert times_s[comparison.best] <= min(times_s) * (1 + 2 * Rule().margin)


@given(st.integers(2, 8), st.integers(0, 2**32))
def test_equal_measurements_lead_to_equal_decisions_whatever_they_are(
    count: int, seed: int
) -> None:
    chance = random.Random(seed)
    first, second = SuccessiveElimination(count), SuccessiveElimination(count)
    for number in range(Rule().most_rounds):
        times = [[chance.lognormvariate(0, 1) for _ in range(3)] for _ in first.alive]
        over = first.add(times)
        assert second.add(times) == over
        assert first.alive == second.alive
        assert first.best in first.alive
        if over:
            return
        assert number + 1 < Rule().most_rounds
    raise AssertionError("it never ends")


def test_what_is_far_too_slow_is_not_measured_again() -> None:
    comparison = SuccessiveElimination(3)
    assert not comparison.add([[1.0], [1.2], [1.6]])
    assert comparison.alive == [0, 1]

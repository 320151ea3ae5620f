"""Fits find the parameters that made the data."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support import reference
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.fit import MAX_KAPPA, fit_kappa, fit_linear, goodness
from wfbp.core.planners import plan
from wfbp.core.timeline import iteration_s

SIZES = [4.0 * 4**k for k in range(13)]


def test_exact_points_give_their_line() -> None:
    true = LinearCost(3e-5, 2e-10)
    points = [(m, true(m)) for m in SIZES]
    fitted = fit_linear(points)
    assert fitted.alpha_s == pytest.approx(3e-5, rel=1e-9)
    assert fitted.beta_s_per_byte == pytest.approx(2e-10, rel=1e-9)
    found = goodness(fitted, points)
    assert found.r_squared == pytest.approx(1.0)
    assert found.max_relative_error < 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_outliers_hardly_move_it(seed: int) -> None:
    rng = random.Random(seed)
    true = LinearCost(3e-5, 2e-10)
    points = [(m, true(m) * rng.uniform(0.97, 1.03)) for m in SIZES for _ in range(5)]
    for index in rng.sample(range(len(points)), 6):
        points[index] = (points[index][0], points[index][1] * rng.choice([8, 1 / 8]))
    fitted = fit_linear(points)
    assert fitted.alpha_s == pytest.approx(3e-5, rel=0.05)
    assert fitted.beta_s_per_byte == pytest.approx(2e-10, rel=0.05)
    assert goodness(fitted, points).max_relative_error > 0.8


@pytest.mark.parametrize(
    ("points", "alpha", "beta"),
    [([(1, 4.0), (2, 2.0), (3, 1.0)], None, 0.0), ([(1, 0.1), (2, 1.0), (3, 3.0)], 0.0, None)],
)
def test_figures_are_never_negative(
    points: list[tuple[float, float]], alpha: float | None, beta: float | None
) -> None:
    fitted = fit_linear(points)
    assert alpha is None or fitted.alpha_s == alpha
    assert beta is None or fitted.beta_s_per_byte == beta
    assert fitted.alpha_s + fitted.beta_s_per_byte > 0


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([(1, 1.0)], "expected at least 2 measurements, found 1"),
        ([(8, 1.0), (8, 2.0)], "all measurements are of 8 bytes"),
        ([(8, 1.0), (-9, 1.0)], r"measured\[1\] bytes: expected a finite number of at least 0"),
        ([(8, float("nan")), (9, 1.0)], r"measured\[0\] seconds: expected a finite number"),
    ],
)
def test_bad_measurements(points: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_linear(points)


def test_goodness_of_a_flat_curve() -> None:
    flat = [(1, 2.0), (2, 2.0)]
    assert goodness(LinearCost(2.0, 0.0), flat).r_squared == 1.0
    off = goodness(LinearCost(1.0, 0.0), flat)
    assert (off.r_squared, off.max_relative_error) == (0.0, 0.5)
    with pytest.raises(ValueError, match="expected at least 1 measurements, found 0"):
        goodness(LinearCost(1.0, 0.0), [])


@pytest.mark.parametrize("kappa", [0.0, 0.07, 0.5, 1.5, 6.0])
def test_kappa_is_found_again(kappa: float) -> None:
    rng = random.Random(3)
    for _ in range(5):
        trace = reference.random_trace(rng, 12)
        costs = Costs(LinearCost(0.05, 1e-4))
        plans = [plan(name, trace, costs) for name in ("layerwise", "mgwfbp", "single", "oasr")]
        true = replace(costs, kappa=kappa)
        measured = [(made, iteration_s(made, trace, true)) for made in plans]
        assert fit_kappa(trace, costs, measured) == pytest.approx(kappa, abs=1e-4)


def test_kappa_stays_in_range_and_at_zero_where_it_says_nothing() -> None:
    trace = reference.random_trace(random.Random(4), 12)
    costs = Costs(LinearCost(0.05, 1e-4))
    wfbp = plan("layerwise", trace, costs)
    assert fit_kappa(trace, costs, [(wfbp, 1e6)]) == pytest.approx(MAX_KAPPA, rel=1e-5)
    after_backward = replace(wfbp, overlap=False)
    assert fit_kappa(trace, costs, [(after_backward, 5.0)]) == 0.0


def test_kappa_needs_measurements() -> None:
    trace = reference.random_trace(random.Random(4), 3)
    costs = Costs(LinearCost(0.05, 1e-4))
    with pytest.raises(ValueError, match="expected at least one plan"):
        fit_kappa(trace, costs, [])
    with pytest.raises(ValueError, match=r"measured\[0\] seconds: expected more than 0"):
        fit_kappa(trace, costs, [(plan("single", trace, costs), 0.0)])

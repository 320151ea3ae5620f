"""Fits cost models to measurements: alpha and beta, their goodness, and kappa."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wfbp.core.checks import number
from wfbp.core.cost import CostModel, Costs, Floats, LinearCost
from wfbp.core.plan import Plan
from wfbp.core.timeline import iteration_by_kappa
from wfbp.core.trace import Trace

MAX_KAPPA = 9.0
"""Computation at a tenth of its speed; beyond this, something else is wrong."""
_REWEIGHTINGS = 30
_HUBER = 1.345
_MAD_TO_SIGMA = 1.4826
_GRID = 25


@dataclass(frozen=True, slots=True)
class Goodness:
    """How well a cost model fits measurements.

    Args:
        r_squared: share of the variance in seconds that is explained; large messages dominate it.
        max_relative_error: worst ``|predicted - measured| / measured``; shows small messages.
    """

    r_squared: float
    max_relative_error: float


def goodness(cost: CostModel, measured: Sequence[tuple[float, float]]) -> Goodness:
    """Compare a cost model with measurements, (bytes, seconds).

    Raises:
        ValueError: no measurements, a bad size, or a time that is not above 0.

    Example:
        >>> goodness(LinearCost(1.0, 0.5), [(2, 2.0), (4, 3.0)])
        Goodness(r_squared=1.0, max_relative_error=0.0)
    """
    sizes, seconds = _columns(measured, at_least=1)
    wrong = cost.many(sizes) - seconds
    unexplained = float(wrong @ wrong)
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    if variance == 0.0:
        variance = unexplained or 1.0  # a flat curve is explained wholly or not at all
    return Goodness(1.0 - unexplained / variance, float(np.abs(wrong / seconds).max()))


def fit_linear(measured: Sequence[tuple[float, float]]) -> LinearCost:
    """The alpha and beta of least relative error, with outliers weighted down.

    The error is relative, because sizes span many orders of magnitude and all matter alike. Huber's
    rule weights outliers down, because some measurements meet foreign traffic. Alpha and beta are
    at least 0.

    Raises:
        ValueError: fewer than two sizes, a bad size, or a time that is not above 0.

    Example:
        >>> cost = fit_linear([(0, 1e-3), (1e6, 2e-3), (2e6, 3e-3)])
        >>> round(cost.alpha_s, 9), round(cost.beta_s_per_byte, 15)
        (0.001, 1e-09)
    """
    sizes, seconds = _columns(measured, at_least=2)
    if sizes.min() == sizes.max():
        raise ValueError(f"all measurements are of {sizes[0]:g} bytes; expected at least two sizes")
    largest = float(sizes.max())
    columns = np.column_stack([np.ones(len(sizes)), sizes / largest])
    unit, weights = seconds, np.ones(len(sizes))
    for _ in range(_REWEIGHTINGS):
        alpha, beta = _non_negative_line(columns / unit[:, None], seconds / unit, weights)
        # Relative to the line from here on: a measurement that is far too short would otherwise
        # count as a large relative error of the line. The floor is for a line through 0.
        unit = np.maximum(columns @ (alpha, beta), 1e-3 * seconds)
        deviation = np.abs(seconds / unit - 1.0)
        limit = _HUBER * _MAD_TO_SIGMA * float(np.median(deviation))
        if limit <= 1e-9:
            break
        weights = np.minimum(1.0, limit / np.maximum(deviation, limit))
    return LinearCost(alpha, beta / largest)


def fit_kappa(trace: Trace, costs: Costs, measured: Sequence[tuple[Plan, float]]) -> float:
    """The kappa, up to ``MAX_KAPPA``, whose predictions fit measured iterations of plans best.

    Minimises the squared relative error of :func:`wfbp.core.timeline.iteration_s` on finer and
    finer grids over the slow-down of computation. The trace was measured without
    communication; the kappa of ``costs`` is ignored.

    Raises:
        ValueError: nothing measured, or a time that is not above 0.

    Example:
        >>> from dataclasses import replace
        >>> from wfbp.core.planners import plan
        >>> from wfbp.core.timeline import iteration_s
        >>> trace, costs = Trace.uniform("abcd", 10, 1.0, 1.0), Costs(LinearCost(0.5, 0.0))
        >>> wfbp = plan("layerwise", trace, costs)
        >>> seconds = iteration_s(wfbp, trace, replace(costs, kappa=0.25))
        >>> round(fit_kappa(trace, costs, [(wfbp, seconds)]), 6)
        0.25
    """
    if not measured:
        raise ValueError("measured: expected at least one plan with its iteration time")
    _check_positive([seconds for _, seconds in measured])
    predictions = [(iteration_by_kappa(plan, trace, costs), seconds) for plan, seconds in measured]

    def error(slowdown: float) -> float:
        kappa = slowdown / (1.0 - slowdown)
        return sum((predict(kappa) / seconds - 1.0) ** 2 for predict, seconds in predictions)

    low, high = 0.0, MAX_KAPPA / (1.0 + MAX_KAPPA)
    while True:
        grid = np.linspace(low, high, _GRID).tolist()
        first = min(range(_GRID), key=[error(slowdown) for slowdown in grid].__getitem__)
        if high - low < 1e-6:
            return float(grid[first] / (1.0 - grid[first]))
        low, high = grid[max(first - 1, 0)], grid[min(first + 1, _GRID - 1)]


def _non_negative_line(rows: Floats, goal: Floats, weights: Floats) -> tuple[float, float]:
    """Weighted least squares of ``rows @ (alpha, beta) = goal`` with both at least 0."""
    root = np.sqrt(weights)
    alpha, beta = np.linalg.lstsq(rows * root[:, None], goal * root, rcond=None)[0]
    if alpha >= 0 and beta >= 0:
        return float(alpha), float(beta)
    only_alpha, only_beta = (
        float(weights @ (column * goal)) / float(weights @ (column * column)) for column in rows.T
    )
    return (only_alpha, 0.0) if beta < 0 else (0.0, only_beta)


def _columns(measured: Sequence[tuple[float, float]], at_least: int) -> tuple[Floats, Floats]:
    if len(measured) < at_least:
        raise ValueError(f"expected at least {at_least} measurements, found {len(measured)}")
    for index, (size, _) in enumerate(measured):
        number(f"measured[{index}] bytes", size)
    _check_positive([seconds for _, seconds in measured])
    table = np.array(measured, dtype=np.float64)
    return table[:, 0], table[:, 1]


def _check_positive(times_s: Sequence[float]) -> None:
    for index, seconds in enumerate(times_s):
        if not number(f"measured[{index}] seconds", seconds) > 0:
            raise ValueError(f"measured[{index}] seconds: expected more than 0, found {seconds!r}")

"""Cost models and their files."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import reference
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost, monotone_points
from wfbp.core.types import Operation

CURVE = PiecewiseCost(((4, 1.0), (10, 1.0), (20, 3.0), (40, 4.0)))


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(0, 1.0), (4, 1.0), (7, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (30, 3.5), (40, 4.0)],
)
def test_piecewise_between_points(nbytes: float, seconds: float) -> None:
    assert CURVE(nbytes) == pytest.approx(seconds)


def test_encoding_is_for_what_is_reduced() -> None:
    costs = Costs(LinearCost(1.0, 0.5))
    assert costs.encoded(0.0) == costs
    encoded = costs.encoded(0.25)
    seconds = [encoded.of(operation)(8) for operation in Operation]
    assert seconds == [1.0 + 6.0, 0.5 + 2.0 + 1.0, 0.5 + 2.0]


def test_piecewise_goes_on_with_the_slope_of_its_upper_half() -> None:
    assert CURVE(60) == pytest.approx(4.0 + 20 * (4.0 - 3.0) / (40 - 20))
    # The last two points alone would give a slope of 0: noise between close sizes.
    noisy = PiecewiseCost(((100, 1.0), (500, 5.0), (900, 10.0), (1001, 10.0)))
    assert noisy(2002) == pytest.approx(10.0 + 1001 * 5 / 501)
    without_lower_half = PiecewiseCost(((100, 1.0), (110, 3.0)))
    assert without_lower_half(120) == pytest.approx(5.0)


def test_piecewise_goes_on_rising_where_noise_left_the_end_flat() -> None:
    """Measured times are made monotone: equal ones mean noise, not a network without limit."""
    curve = PiecewiseCost(((4, 15e-6), (2**17, 150e-6), (2**20, 150e-6)))
    slope = (150e-6 - 15e-6) / (2**20 - 4)
    assert curve(2**21) == pytest.approx(150e-6 + slope * 2**20)
    assert curve.many(np.array([2.0**21]))[0] == pytest.approx(curve(2**21))


def test_many_equals_one_by_one_and_never_falls() -> None:
    rng = random.Random(0)
    for _ in range(200):
        cost = reference.random_cost(rng, rng.random() < 0.3)
        sizes = np.sort([rng.random() * 10000 for _ in range(50)] + [0.0])
        seconds = cost.many(sizes)
        np.testing.assert_allclose(seconds, [cost(m) for m in sizes], rtol=1e-12)
        assert (np.diff(seconds) >= -1e-15).all()
        assert cost.scaled(0.5)(777.0) == pytest.approx(cost(777.0) / 2)
    assert cost.many(sizes.reshape(3, 17)).shape == (3, 17)


@pytest.mark.parametrize(("alpha", "beta"), [(-1.0, 0.0), (0.0, float("inf")), ("1", 0.0)])
def test_bad_linear_cost(alpha: Any, beta: Any) -> None:
    with pytest.raises(ValueError, match=r"alpha_s|beta_s_per_byte"):
        LinearCost(alpha, beta)


def test_absent_operations_cost_half() -> None:
    costs = Costs(CURVE)
    for operation in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER):
        assert costs.of(operation)(30) == pytest.approx(CURVE(30) / 2)
    own = Costs(CURVE, LinearCost(7.0, 0.0), LinearCost(8.0, 0.0))
    assert [own.of(o)(30) for o in Operation] == [CURVE(30), 7.0, 8.0]


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.floats(0, 100, allow_subnormal=False)),
        min_size=1,
        max_size=30,
    )
)
def test_monotone_points_are_the_closest_monotone_curve(
    measured: list[tuple[float, float]],
) -> None:
    points = monotone_points(measured)
    sizes, seconds = zip(*points, strict=True)
    assert list(sizes) == sorted({size for size, _ in measured})
    assert list(seconds) == sorted(seconds)
    medians = [float(np.median([s for b, s in measured if b == size])) for size in sizes]
    # Isotonic regression in closed form: max over starts of min over ends of the mean between.
    n = len(medians)
    closed = [
        max(min(float(np.mean(medians[a : b + 1])) for b in range(k, n)) for a in range(k + 1))
        for k in range(n)
    ]
    np.testing.assert_allclose(seconds, closed, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(LinearCost(1e-4, 1e-9)),
        Costs(CURVE, kappa=0.5),
        Costs(CURVE, LinearCost(1.0, 2.0), CURVE.scaled(3.0), 1.5),
    ],
)
def test_json_round_trip(costs: Costs, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(costs.to_json()))
    loaded = Costs.load(path)
    assert loaded.to_json() == costs.to_json()
    assert loaded == costs


def test_json_of_the_documented_form() -> None:
    costs = Costs.from_json(
        {
            "format": "wfbp-cost/1",
            "all_reduce": {"points": [[4, 1e-5], [1024, 2e-5]]},
            "all_gather": {"alpha_s": 1, "beta_s_per_byte": 0},
            "kappa": 0,
        }
    )
    assert costs == Costs(
        PiecewiseCost(((4.0, 1e-5), (1024.0, 2e-5))), None, LinearCost(1.0, 0.0), 0.0
    )


LINEAR = {"alpha_s": 1.0, "beta_s_per_byte": 0.0}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a cost file: expected format 'wfbp-cost/1', found 'list'"),
        ({}, "all_reduce: missing"),
        ({"all_reduce": 3}, "all_reduce: expected an object, found int"),
        ({"all_reduce": {}}, "all_reduce: missing alpha_s, beta_s_per_byte"),
        (
            {"all_reduce": {**LINEAR, "alpha_s": -1}},
            "all_reduce.alpha_s: expected a finite number of at least 0, found -1",
        ),
        (
            {"all_reduce": {**LINEAR, "alpha_s": True}},
            "all_reduce.alpha_s: expected a number, found True",
        ),
        ({"all_reduce": {**LINEAR, "alpha_s": 10**400}}, "all_reduce.alpha_s: too large"),
        (
            {"all_reduce": {**LINEAR, "points": []}},
            "all_reduce: unknown key 'alpha_s', 'beta_s_per_byte'; known are points",
        ),
        ({"all_reduce": {"points": 3}}, "all_reduce.points: expected a list, found int"),
        (
            {"all_reduce": {"points": [[1, 2, 3]]}},
            "all_reduce.points[0]: expected [bytes, seconds], found [1, 2, 3]",
        ),
        (
            {"all_reduce": {"points": [[1, 2], [8, float("nan")]]}},
            "all_reduce.points[1] seconds: expected a finite number of at least 0, found nan",
        ),
        (
            {"all_reduce": {"points": [[8, 1], [4, 2]]}},
            "all_reduce.points[1]: bytes must increase, found 4 after 8",
        ),
        (
            {"all_reduce": {"points": [[4, 1], [8, 0.5]]}},
            "all_reduce.points[1]: seconds must not fall, found 0.5 after 1",
        ),
        (
            {"all_reduce": LINEAR, "all_gather": {"points": [[8, 1]]}},
            "all_gather.points: expected at least 2, found 1",
        ),
        (
            {"all_reduce": LINEAR, "kappa": -0.5},
            "kappa: expected a finite number of at least 0, found -0.5",
        ),
        (
            {"all_reduce": LINEAR, "broadcast": LINEAR},
            "unknown key 'broadcast'; known are format, all_reduce, reduce_scatter, all_gather,",
        ),
    ],
)
def test_bad_documents_are_named_in_one_line(document: Any, message: str, tmp_path: Path) -> None:
    if isinstance(document, dict):
        document = {"format": "wfbp-cost/1", **document}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"cost\.json: ") as caught:
        Costs.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\xff"])
def test_not_json(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cost\.json: not JSON: ") as caught:
        Costs.load(path)
    assert "\n" not in str(caught.value)


def test_compressed_costs_are_those_of_fewer_bytes() -> None:
    """But all-gathers bring parameters, which stay as they are."""
    for costs in (Costs(CURVE), Costs(CURVE, CURVE, LinearCost(1.0, 2.0), kappa=0.5)):
        half = costs.compressed(0.5)
        assert half.kappa == costs.kappa
        for nbytes in (0, 3, 16, 30, 70, 200):
            for operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER):
                assert half.of(operation)(nbytes) == pytest.approx(costs.of(operation)(nbytes / 2))
            gather = Operation.ALL_GATHER
            assert half.of(gather)(nbytes) == costs.of(gather)(nbytes)

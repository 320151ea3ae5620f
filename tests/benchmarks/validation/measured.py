"""Alpha, beta and kappa from two published columns, and the prediction of the third."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from scipy.optimize import minimize

from tests.benchmarks.scaling import DATA
from tests.benchmarks.validation.architectures import densenet, resnet, scaled
from wfbp.cli.inputs import EXAMPLE_TRACES
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.planners import plan
from wfbp.core.planners.optimum import finish_s
from wfbp.core.planners.partition import all_by, measure, rows_of
from wfbp.core.timeline import timeline
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

CLUSTERS = ("10GbE", "56Gb/s InfiniBand")
KAPPAS = tuple(0.25 * k for k in range(13))
FINEST = 0.01


@dataclass(frozen=True)
class Measured:
    """A model and its measured iterations: seconds by cluster: WFBP, single message, MG-WFBP."""

    trace: Trace
    seconds: dict[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Prediction:
    """One row of the table; errors are relative."""

    cluster: str
    model: str
    measured_s: float
    predicted_s: float
    lower_bound_s: float
    fit_errors: tuple[float, float]

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1


@cache
def measured_rows() -> tuple[Measured, ...]:
    """The published measurements, each with its model's trace at the published compute time."""
    document = json.loads((DATA / "measured_tpds2021.json").read_text())
    return tuple(
        Measured(
            trace_of(row["model"], row["compute_s"]), {name: tuple(row[name]) for name in CLUSTERS}
        )
        for row in document["rows"]
    )


def trace_of(model: str, compute_s: float) -> Trace:
    """A model's trace, with forward and backward taking ``compute_s``."""
    if model == "ResNet-152":
        return resnet((3, 8, 36, 3), model, compute_s)
    if model == "DenseNet-161":
        return densenet(48, 96, (6, 12, 36, 24), model, compute_s)
    return scaled(Trace.load(EXAMPLE_TRACES / f"{model.lower()}.json"), compute_s)


@dataclass(frozen=True)
class Fit:
    """Costs, and their :func:`rms`."""

    costs: Costs
    rms: float


def fit(cluster: str, *, kappas: Sequence[float] = KAPPAS) -> Fit:
    """Costs of least squared relative error over the columns ``layerwise`` and ``single``.

    The third column is not looked at. For each kappa alpha and beta are fitted, because the error
    has several valleys over kappa; around the best of ``kappas`` the search goes on, if there is
    more than one.
    """
    best = min((fit_line(cluster, kappa) for kappa in kappas), key=lambda fitted: fitted.rms)
    step = max((b - a for a, b in pairwise(kappas)), default=0.0)
    while step > FINEST:
        step /= 2
        around = (best.costs.kappa - step, best.costs.kappa + step)
        near = [fit_line(cluster, kappa) for kappa in around if kappa >= 0]
        best = min([best, *near], key=lambda fitted: fitted.rms)
    return best


@cache
def fit_line(cluster: str, kappa: float) -> Fit:
    """Alpha and beta of least squared relative error over the two columns, kappa being given."""

    def costs_of(x: Sequence[float]) -> Costs:
        return Costs(LinearCost(1e-3 * abs(float(x[0])), 1e-9 * abs(float(x[1]))), kappa=kappa)

    found = minimize(
        lambda x: rms(cluster, costs_of(x)) ** 2,
        [0.5, 1.5],
        method="Nelder-Mead",
        options={"xatol": 1e-3, "fatol": 1e-9},
    )
    return Fit(costs_of(found.x), float(found.fun) ** 0.5)


def rms(cluster: str, costs: Costs) -> float:
    """How far costs are from the columns ``layerwise`` and ``single``: relative RMS."""
    errors = [
        seconds / measured - 1
        for row in measured_rows()
        for seconds, measured in zip(
            fitted_columns(row.trace, costs), row.seconds[cluster], strict=False
        )
    ]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def fitted_columns(trace: Trace, costs: Costs) -> tuple[float, float]:
    """``iteration_s`` of ``layerwise`` and ``single``, without making their plans."""
    lag = costs.kappa / (1.0 + costs.kappa)
    count = len(trace.tensors)
    row = rows_of(trace, costs, all_by(Operation.ALL_REDUCE, count))[0]
    alone, together = (
        finish_s(measure(row, ends, costs.kappa), lag) for ends in (range(1, count + 1), [count])
    )
    return trace.forward_s + alone, trace.forward_s + together


def predict(cluster: str, costs: Costs) -> list[Prediction]:
    """MG-WFBP by the costs, beside what was measured; and how well the other columns fit."""
    found = []
    for row in measured_rows():
        columns = zip(fitted_columns(row.trace, costs), row.seconds[cluster], strict=False)
        errors = [seconds / measured - 1 for seconds, measured in columns]
        merged = timeline(plan("mgwfbp", row.trace, costs), row.trace, costs)
        found.append(
            Prediction(
                cluster,
                row.trace.model,
                row.seconds[cluster][2],
                merged.iteration_s,
                merged.lower_bound_s,
                (errors[0], errors[1]),
            )
        )
    return found


def mean_absolute_error(predictions: Sequence[Prediction]) -> float:
    """Mean of the absolute relative errors."""
    return sum(abs(p.error) for p in predictions) / len(predictions)

"""What a message costs by its size, and how well a straight line tells it."""

from __future__ import annotations

from typing import Any

import numpy as np

from wfbp.cli.figures import MS, Figure, axis, figure, marker, series
from wfbp.core.cost import CostModel, Costs, PiecewiseCost
from wfbp.core.fit import fit_linear, goodness
from wfbp.core.types import Operation

_SAMPLES = 200
_LARGEST = 2.0**28


def cost_curve(costs: Costs) -> Figure:
    """The measured points of each collective, the curve through them, and the fitted line; given
    lines are drawn as they are."""
    data: list[dict[str, Any]] = []
    own = {
        Operation.ALL_REDUCE: costs.all_reduce,
        Operation.REDUCE_SCATTER: costs.reduce_scatter,
        Operation.ALL_GATHER: costs.all_gather,
    }
    present = [(index, op, cost) for index, (op, cost) in enumerate(own.items()) if cost]
    for index, operation, cost in present:
        name = operation.value.replace("_", "-")
        if isinstance(cost, PiecewiseCost):
            data += _measured(name, index, cost)
        else:
            data.append(_line(f"{name}, given", series(index), cost, 4.0, _LARGEST, "solid"))
    return figure(
        data,
        axis("bytes", type="log", exponentformat="SI"),
        axis("ms", type="log"),
        hovermode="closest",
        height=420,
    )


def _measured(name: str, index: int, cost: PiecewiseCost) -> list[dict[str, Any]]:
    color = series(index)
    points = [(max(size, 1.0), seconds) for size, seconds in cost.points if seconds > 0]
    curve = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": f"{name}, measured",
        "x": [size for size, _ in points],
        "y": [seconds * MS for _, seconds in points],
        "hovertemplate": "%{x:,.0f} bytes<br>%{y:.4f} ms<extra></extra>",
        "line": {"color": color, "width": 4.0 - index},
        "marker": marker(index),
    }
    if len(points) < 2:
        return [curve]
    fitted = fit_linear(points)
    how = goodness(fitted, points)
    text = (
        f"{name}, fit: {fitted.alpha_s * 1e6:.1f} µs + "
        f"{fitted.beta_s_per_byte * 1e9:.3f} ns/byte (R² {how.r_squared:.3f}, "
        f"worst {how.max_relative_error:.0%})"
    )
    return [curve, _line(text, color, fitted, points[0][0], points[-1][0], "dot")]


def _line(
    name: str, color: str, cost: CostModel, least: float, largest: float, dash: str
) -> dict[str, Any]:
    sizes = np.geomspace(least, largest, _SAMPLES)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": sizes.tolist(),
        "y": (cost.many(sizes) * MS).tolist(),
        "hovertemplate": "%{x:,.0f} bytes<br>%{y:.4f} ms<extra></extra>",
        "line": {"color": color, "dash": dash, "width": 1.5},
    }

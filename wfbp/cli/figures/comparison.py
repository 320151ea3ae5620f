"""Predictions beside measurements, and schedules beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from wfbp.cli.figures import MS, Figure, axis, figure
from wfbp.cli.forecast import Forecast
from wfbp.cli.run_files import Run


def schedules(forecasts: Sequence[Forecast], measured: tuple[str, float] | None) -> Figure:
    """Every schedule's predicted iteration, split into computation and exposed communication.

    ``measured`` is the schedule that ran, and its measured seconds per iteration.
    """
    rows = sorted(forecasts, key=lambda f: f.iteration_s, reverse=True)
    labels = {f.schedule: f"{f.schedule}, T/LB {f.ratio_to_lower_bound:.3f}" for f in rows}
    names = list(labels.values())
    data = [
        _bars("computation", "@backward", names, [f.iteration_s - f.exposed_s for f in rows]),
        _bars("exposed communication", "@exposed", names, [f.exposed_s for f in rows]),
    ]
    bound_s = rows[0].lower_bound_s
    shapes = [_vertical(bound_s, "@bound", "dash")]
    data.append(_key(f"lower bound, {bound_s * MS:.3f} ms", "@bound", "dash"))
    if measured is not None:
        name, seconds = measured
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"measured ({name}), {seconds * MS:.3f} ms",
                "x": [seconds * MS],
                "y": [labels.get(name, name)],
                "marker": {"symbol": "diamond", "size": 12, "color": "@measured"},
                "hovertemplate": "measured: %{x:.3f} ms<extra></extra>",
            }
        )
        if name not in labels:  # a plan by no planner of the registry still shows
            names = [name, *names]
    return figure(
        data,
        axis("ms per iteration", rangemode="tozero"),
        {"categoryorder": "array", "categoryarray": names, "automargin": True},
        barmode="stack",
        shapes=shapes,
        height=140 + 34 * len(names),
    )


def predicted_and_measured(run: Run) -> Figure | None:
    """Iteration and exposed communication: predicted, and as each rank measured them."""
    pairs = (
        ("iteration", "predicted_iteration_s", "measured_iteration_s"),
        ("exposed communication", "predicted_exposed_s", "exposed_s"),
    )
    predicted = [run.ranks[0].figures[key] for _, key, _ in pairs]
    if all(value is None for value in predicted):
        return None
    names = [name for name, _, _ in pairs]
    measured = [[r.figures[key] for r in run.ranks] for _, _, key in pairs]
    data = [
        _columns("predicted", "@backward", names, predicted),
        _spread("measured: median, fastest and slowest rank", "@measured", names, measured),
    ]
    bound_s = run.ranks[0].figures["lower_bound_s"]
    if bound_s is not None:
        data.append(_columns("lower bound", "@bound", names, [bound_s, None]))
    return figure(
        data,
        {"automargin": True},
        axis("ms", rangemode="tozero"),
        barmode="group",
        height=400,
    )


def message_times(run: Run, predicted: Forecast) -> Figure | None:
    """Each group's duration on the channel: as costs say, and as measured on the slowest rank."""
    measured: dict[int, list[float]] = {}
    count = min(len(rank.iterations) for rank in run.ranks)
    for index in range(-count, 0):
        slowest: dict[int, float] = {}
        for rank in run.ranks:
            ended_s = 0.0
            for stamps in rank.iterations[index].groups:
                # Two groups may be under way at once; the channel is the second's from then on.
                alone_s = stamps.end_s - max(stamps.start_s, ended_s)
                slowest[stamps.group] = max(slowest.get(stamps.group, 0.0), alone_s)
                ended_s = stamps.end_s
        for group, seconds in slowest.items():
            measured.setdefault(group, []).append(seconds)
    if not measured:
        return None
    groups = sorted(measured)
    medians: list[float | None] = [statistics.median(measured[g]) for g in groups]
    costs: list[float | None] = [
        predicted.groups[g].end_s - predicted.groups[g].start_s for g in groups
    ]
    labels = [f"group {g}" for g in groups]
    return figure(
        [
            _columns("predicted", "@backward", labels, costs),
            _columns("measured, slowest rank", "@measured", labels, medians),
        ],
        {"automargin": True},
        axis("ms on the channel", rangemode="tozero"),
        barmode="group",
        height=380,
    )


def _bars(name: str, color: str, rows: Sequence[str], seconds: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(rows),
        "x": [value * MS for value in seconds],
        "marker": {"color": color},
        "hovertemplate": f"%{{y}}, {name}: %{{x:.3f}} ms<extra></extra>",
    }


def _columns(
    name: str, color: str, labels: Sequence[str], seconds: Sequence[float | None]
) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": list(labels),
        "y": [None if value is None else value * MS for value in seconds],
        "marker": {"color": color, "line": {"color": "@paper", "width": 1}},
        "hovertemplate": f"%{{x}}, {name}: %{{y:.3f}} ms<extra></extra>",
    }


def _spread(
    name: str, color: str, labels: Sequence[str], seconds: Sequence[Sequence[float | None]]
) -> dict[str, Any]:
    """Columns of medians, with whiskers from the least to the greatest."""
    known = [[value for value in values if value is not None] for values in seconds]
    middle = [statistics.median(values) if values else None for values in known]
    pairs = [(m, values) for m, values in zip(middle, known, strict=True) if m is not None]
    whiskers = {
        "type": "data",
        "symmetric": False,
        "array": [(max(values) - m) * MS for m, values in pairs],
        "arrayminus": [(m - min(values)) * MS for m, values in pairs],
        "color": "@ink",
    }
    return _columns(name, color, labels, middle) | {"error_y": whiskers}


def _vertical(seconds: float, color: str, dash: str) -> dict[str, Any]:
    return {
        "type": "line",
        "x0": seconds * MS,
        "x1": seconds * MS,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": color, "dash": dash, "width": 2},
    }


def _key(name: str, color: str, dash: str) -> dict[str, Any]:
    """A legend entry for a shape."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [None],
        "y": [None],
        "line": {"color": color, "dash": dash, "width": 2},
    }

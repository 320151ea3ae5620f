"""Figures for HTML pages, as data in the part of Plotly's form that ``plot.js`` draws.

``page.html`` defines colours such as ``@backward`` for a light and a dark theme.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from wfbp.cli.reasons import reasons
from wfbp.cli.run_files import RankRun, Run
from wfbp.cli.tables import size
from wfbp.core.cost import CostModel, Costs, PiecewiseCost
from wfbp.core.fit import fit_linear, goodness
from wfbp.core.timeline import IterationForecast
from wfbp.core.trace import Trace

Figure = dict[str, Any]
"""``{"data": [...], "layout": {...}}``."""
MS = 1e3


def _figure(
    data: Sequence[dict[str, Any]], x: dict[str, Any], y: dict[str, Any], **layout: Any
) -> Figure:
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    return {"data": list(data), "layout": {"xaxis": x, "yaxis": y, "legend": legend, **layout}}


def _axis(title: str, **settings: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **settings}


def _lines(
    name: str,
    x: Sequence[float | None],
    y: Sequence[float | None],
    line: dict[str, Any],
    **more: Any,
) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, **more}


def schedules(forecasts: Sequence[IterationForecast], measured: tuple[str, float] | None) -> Figure:
    """Predicted iterations by schedule; ``measured`` is the schedule that ran, and its seconds."""
    rows = sorted(forecasts, key=lambda f: f.iteration_s, reverse=True)
    labels = {
        f.plan.schedule: f"{f.plan.schedule}, T/LB {f.ratio_to_lower_bound:.3f}" for f in rows
    }
    names = list(labels.values())
    bound_ms = rows[0].lower_bound_s * MS
    dashed = {"color": "@bound", "dash": "dash", "width": 2}
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": [value * MS for value in seconds],
            "y": names,
            "marker": {"color": color},
            "hovertemplate": f"%{{y}}, {name}: %{{x:.3f}} ms<extra></extra>",
        }
        for name, color, seconds in (
            ("computation", "@backward", [f.iteration_s - f.exposed_s for f in rows]),
            ("exposed communication", "@exposed", [f.exposed_s for f in rows]),
        )
    ]
    data.append(_lines(f"lower bound, {bound_ms:.3f} ms", [None], [None], dashed))  # for the legend
    if measured is not None:
        name, seconds = measured
        if name not in labels:  # a plan by no planner of the registry
            names = [name, *names]
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
    ends = {"x0": bound_ms, "x1": bound_ms, "y0": 0, "y1": 1, "yref": "paper"}
    return _figure(
        data,
        _axis("ms per iteration", rangemode="tozero"),
        {"categoryorder": "array", "categoryarray": names, "automargin": True},
        barmode="stack",
        shapes=[{"type": "line", **ends, "line": dashed}],
        height=140 + 34 * len(names),
    )


def cost_curve(costs: Costs) -> Figure:
    """Seconds per message by size: measured points and the fitted line, or a given line."""
    data = []
    own = {
        "all-reduce": costs.all_reduce,
        "reduce-scatter": costs.reduce_scatter,
        "all-gather": costs.all_gather,
    }
    for index, (name, cost) in enumerate(own.items()):
        color = f"@series{index}"
        if not isinstance(cost, PiecewiseCost):
            if cost is not None:
                data.append(_cost_line(f"{name}, given", color, cost, 4.0, 2.0**28, "solid"))
            continue
        points = [(max(nbytes, 1.0), seconds) for nbytes, seconds in cost.points if seconds > 0]
        data.append(
            _lines(
                f"{name}, measured",
                [nbytes for nbytes, _ in points],
                [seconds * MS for _, seconds in points],
                {"color": color, "width": 4.0 - index},
                mode="lines+markers",
                marker={"symbol": ("circle", "square", "diamond")[index], "size": 8},
                hovertemplate="%{x:,.0f} bytes<br>%{y:.4f} ms<extra></extra>",
            )
        )
        if len(points) > 1:
            fitted = fit_linear(points)
            how = goodness(fitted, points)
            text = (
                f"{name}, fit: {fitted.alpha_s * 1e6:.1f} µs + "
                f"{fitted.beta_s_per_byte * 1e9:.3f} ns/byte (R² {how.r_squared:.3f}, "
                f"worst {how.max_relative_error:.0%})"
            )
            data.append(_cost_line(text, color, fitted, points[0][0], points[-1][0], "dot"))
    x, y = _axis("bytes", type="log", exponentformat="SI"), _axis("ms", type="log")
    return _figure(data, x, y, hovermode="closest", height=420)


def _cost_line(
    name: str, color: str, cost: CostModel, least: float, largest: float, dash: str
) -> dict[str, Any]:
    sizes = np.geomspace(least, largest, 200)
    line = {"color": color, "dash": dash, "width": 1.5}
    text = "%{x:,.0f} bytes<br>%{y:.4f} ms<extra></extra>"
    return _lines(name, sizes.tolist(), (cost.many(sizes) * MS).tolist(), line, hovertemplate=text)


Bar = tuple[str, str, float, float, str]
"""Kind, row, start and end in seconds, and text of a bar of a Gantt chart."""

_FORWARD, _BACKWARD, _WAITING = "forward and the rest", "backward", "waiting for communication"
_PACKING, _READY = "packing", "gradient exists"
_MESSAGES = ("messages", "messages (every other)")
_KINDS = {
    _FORWARD: ("@forward", 0.8),
    _BACKWARD: ("@backward", 0.8),
    _WAITING: ("@exposed", 0.8),
    _PACKING: ("@packing", 0.8),
    _MESSAGES[0]: ("@link", 0.8),
    _MESSAGES[1]: ("@link2", 0.5),
}
"""Colour and width: two messages may be under way at once, so every other one is thinner."""
_MOST_READY = 2000


def _chart(title: str, bars: Sequence[Bar]) -> Figure:
    """A Gantt chart; bars of the kind ``_READY`` are marks."""
    rows = list(dict.fromkeys(row for _, row, *_ in bars))
    data: list[dict[str, Any]] = []
    for kind, (color, width) in _KINDS.items():
        mine = [bar[1:] for bar in bars if bar[0] == kind and bar[3] > bar[2]]
        if mine:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": kind,
                    "width": width,
                    "y": [row for row, _, _, _ in mine],
                    "base": [start_s * MS for _, start_s, _, _ in mine],
                    "x": [(end_s - start_s) * MS for _, start_s, end_s, _ in mine],
                    "customdata": [[start * MS, end * MS, text] for _, start, end, text in mine],
                    "hovertemplate": "%{customdata[2]}<br>%{customdata[0]:.3f} to "
                    "%{customdata[1]:.3f} ms (%{x:.3f} ms)<extra></extra>",
                    "marker": {"color": color, "line": {"color": "@paper", "width": 1}},
                }
            )
    ready = [bar[1:] for bar in bars if bar[0] == _READY]
    if len(ready) <= _MOST_READY * len(rows):
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _READY,
                "x": [at_s * MS for _, at_s, _, _ in ready],
                "y": [row for row, _, _, _ in ready],
                "text": [text for _, _, _, text in ready],
                "hovertemplate": "%{text}<br>%{x:.3f} ms<extra></extra>",
                "marker": {"symbol": "line-ns", "size": 9, "line": {"width": 1, "color": "@ink"}},
            }
        )
    return _figure(
        data,
        _axis(title, rangemode="tozero"),
        {"categoryorder": "array", "categoryarray": rows[::-1], "automargin": True},
        barmode="overlay",
        height=120 + 34 * len(rows),
        hovermode="closest",
    )


def median_iteration(run: Run) -> tuple[int, int]:
    """Which iteration has the median length, from the end (-1 is the last), and of how many."""
    count = min(len(rank.iterations) for rank in run.ranks)
    lengths = [(max(r.iterations[i]["done_s"] for r in run.ranks), i) for i in range(-count, 0)]
    return (sorted(lengths)[(count - 1) // 2][1] if lengths else 0), count


def gantt(run: Run, index: int, predicted: IterationForecast | None) -> Figure:
    """One iteration of every rank beside its prediction."""
    trace, costs = run.ranks[0].trace, run.ranks[0].costs
    bars: list[Bar] = []
    if predicted is not None and trace is not None and costs is not None:
        bars += _predicted_bars(predicted, trace, costs)
    # Each rank's clock starts at the end of the previous iteration's last message, which ends at
    # nearly the same moment on all ranks.
    for rank in run.ranks:
        bars += _rank_bars(rank, rank.iterations[index])
    return _chart("ms since the previous iteration's gradients were in hand", bars)


def _compute_bars(row: str, ends_s: Sequence[float]) -> list[Bar]:
    """A rank's computation: where forward, backward and the wait for communication end."""
    forward_s, backward_s, done_s = ends_s
    return [
        (_FORWARD, row, 0.0, forward_s, "forward, optimizer, data"),
        (_BACKWARD, row, forward_s, backward_s, "backward"),
        (_WAITING, row, backward_s, done_s, "nothing left to compute"),
    ]


def _rank_bars(rank: RankRun, iteration: dict[str, Any]) -> list[Bar]:
    compute, link = f"rank {rank.rank} compute", f"rank {rank.rank} messages"
    ready_s, closed_s = iteration["ready_s"], iteration["closed_s"]
    forward_end_s = 0.0
    if rank.trace is not None:
        # Forward is timed while profiling only; the trace's time is shown for later steps, too.
        ends = [rank.trace.other_s + rank.trace.forward_s, closed_s]
        forward_end_s = min(ends + [at for at in ready_s if at is not None])
    bars = _compute_bars(compute, (forward_end_s, closed_s, iteration["done_s"]))
    tensors = rank.plan.tensors
    for at in iteration["groups"]:
        group = rank.plan.groups[at["group"]]
        names = [_plain(tensors[k].name) for k in group.tensors]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        nbytes = sum(tensors[k].nbytes for k in group.tensors)
        text = f"group {at['group']}: {group.operation.value} of {size(nbytes)}<br>"
        text += ", ".join(names[:4]) + more
        times = [ready_s[k] for k in group.tensors if ready_s[k] is not None]
        text += f"<br>ready at {max(times) * MS:.3f} ms" if times else ""
        bars.append((_PACKING, link, at["start_s"], at["packed_s"], f"packing {text}"))
        bars.append((_MESSAGES[at["group"] % 2], link, at["packed_s"], at["end_s"], text))
    return bars + [
        (_READY, compute, at, at, f"gradient of {_plain(spec.name)}")
        for spec, at in zip(tensors, ready_s, strict=True)
        if at is not None
    ]


def _predicted_bars(predicted: IterationForecast, trace: Trace, costs: Costs) -> list[Bar]:
    """The prediction on the same clock: its backward starts after forward."""
    begin_s = trace.other_s + trace.forward_s
    end_s = min(predicted.iteration_s, begin_s + predicted.backward_end_s)
    bars = _compute_bars("predicted compute", (begin_s, end_s, predicted.iteration_s))
    for index, (_, why) in enumerate(reasons(predicted, trace, costs)):
        group, at = predicted.plan.groups[index], predicted.groups[index]
        text = f"group {index}: {group.operation.value} of {size(at.nbytes)}<br>{_plain(why, 200)}"
        start_s, end_s = begin_s + at.start_s, begin_s + at.end_s
        bars.append((_MESSAGES[index % 2], "predicted messages", start_s, end_s, text))
    return bars


def _plain(text: str, longest: int = 60) -> str:
    """An external name as a label: no markup, limited length."""
    return html.escape(text if len(text) <= longest else text[: longest - 3] + "...", quote=False)

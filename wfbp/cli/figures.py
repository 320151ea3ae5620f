"""Figures of recorded runs and measured costs, by Plotly (the extra ``report``), and their page.

A page is one self-contained HTML file, with a content policy that forbids it to load anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np

from wfbp.cli.plan import reasons
from wfbp.cli.run_files import RankRun, Run
from wfbp.cli.tables import short_milliseconds as milliseconds
from wfbp.cli.tables import size
from wfbp.core.cost import Costs, PiecewiseCost
from wfbp.core.fit import fit_linear, goodness
from wfbp.core.timeline import IterationForecast
from wfbp.core.trace import Trace
from wfbp.errors import WfbpError

try:
    import plotly.graph_objects as go
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise WfbpError("pages with figures need Plotly: pip install 'wfbp[report]'") from error

MS = 1e3
MARGIN = {"t": 30, "r": 10, "b": 45, "l": 10}
"""Pixels around a figure; tick labels get what they need."""
BLUE, ORANGE, RED, GREEN, GREY = "#2f6fb0", "#e0881a", "#c8402f", "#1f8a5b", "#6b7280"


def schedules(
    forecasts: Sequence[IterationForecast], measured: tuple[str, float] | None
) -> go.Figure:
    """Predicted iterations by schedule; ``measured`` is the schedule that ran, and its seconds."""
    rows = sorted(forecasts, key=lambda f: f.iteration_s, reverse=True)
    names = [f.plan.schedule for f in rows]
    ratios = [f"T/LB {f.ratio_to_lower_bound:.2f}" for f in rows]
    figure = go.Figure()
    for name, color, seconds, texts in (
        ("computation", BLUE, [f.iteration_s - f.exposed_s for f in rows], ratios),
        ("exposed communication", RED, [f.exposed_s for f in rows], None),
    ):
        figure.add_bar(
            name=name,
            orientation="h",
            x=[value * MS for value in seconds],
            y=names,
            text=texts,
            textposition="inside",
            insidetextanchor="start",
            marker_color=color,
            hovertemplate="%{y}: %{x:.2f} ms",
        )
    bound_ms = rows[0].lower_bound_s * MS
    name = f"lower bound (LB), {milliseconds(rows[0].lower_bound_s)}"
    figure.add_vline(bound_ms, name=name, line={"color": GREY, "dash": "dash"})
    if measured is not None:
        name, ran_s = measured
        figure.add_scatter(
            name=f"measured ({name}), {milliseconds(ran_s)}",
            mode="markers",
            x=[ran_s * MS],
            y=[name],
            marker={"symbol": "diamond", "size": 12, "color": GREEN},
        )
    height = 75 + 34 * len(rows)
    figure.update_layout(barmode="stack", height=height, xaxis_rangemode="tozero")
    return figure.update_xaxes(title="ms per iteration")


def cost_curve(costs: Costs) -> go.Figure:
    """Seconds per message by size: measured points and the fitted line."""
    figure = go.Figure()
    own = {
        "all-reduce": (BLUE, costs.all_reduce),
        "reduce-scatter": (ORANGE, costs.reduce_scatter),
        "all-gather": (GREEN, costs.all_gather),
    }
    for name, (color, cost) in own.items():
        if not isinstance(cost, PiecewiseCost):  # not measured
            continue
        points = [(max(nbytes, 1.0), seconds) for nbytes, seconds in cost.points if seconds > 0]
        figure.add_scatter(
            name=f"{name}, measured",
            mode="lines+markers",
            x=[nbytes for nbytes, _ in points],
            y=[seconds * MS for _, seconds in points],
            line_color=color,
        )
        if len(points) > 1:
            fitted = fit_linear(points)
            how = goodness(fitted, points)
            text = (
                f"{name}, fit: {fitted.alpha_s * 1e6:.1f} µs + "
                f"{fitted.beta_s_per_byte * 1e9:.3g} ns/byte (R² {how.r_squared:.2f}, "
                f"worst {how.max_relative_error:.0%})"
            )
            sizes = np.geomspace(points[0][0], points[-1][0], 200)
            line = {"color": color, "dash": "dot", "width": 1.5}
            figure.add_scatter(
                name=text, mode="lines", x=sizes, y=fitted.many(sizes) * MS, line=line
            )
    figure.update_layout(height=360)
    figure.update_traces(hovertemplate="%{x:,.0f} bytes<br>%{y:.3g} ms")
    figure.update_xaxes(title="bytes", type="log", exponentformat="SI")
    return figure.update_yaxes(title="ms", type="log", dtick="D2")  # of each decade 1, 2 and 5


Bar = tuple[str, str, float, float, str]
"""Kind, row, start and end in seconds, and text of a bar of a Gantt chart."""

_FORWARD, _BACKWARD, _WAITING = "forward and the rest", "backward", "waiting for communication"
_PACKING, _MESSAGES = "packing", "messages"
_COLORS = {
    _FORWARD: "#9cc3e6",
    _BACKWARD: BLUE,
    _WAITING: RED,
    _PACKING: "#f2c98a",
    _MESSAGES: ORANGE,
}


def median_iteration(run: Run) -> tuple[int, int]:
    """Which iteration has the median length, from the end (-1 is the last), and of how many."""
    count = min(len(rank.iterations) for rank in run.ranks)
    lengths = [(max(r.iterations[i]["done_s"] for r in run.ranks), i) for i in range(-count, 0)]
    return (statistics.median_low(lengths)[1] if lengths else 0), count


def gantt(run: Run, index: int, predicted: IterationForecast | None) -> go.Figure:
    """One iteration of every rank beside its prediction."""
    trace = run.ranks[0].trace
    bars: list[Bar] = []
    if predicted is not None and trace is not None:
        bars += _predicted_bars(predicted, trace)
    # Each rank's clock starts at the end of the previous iteration's last message, which ends at
    # nearly the same moment on all ranks.
    for rank in run.ranks:
        bars += _rank_bars(rank, rank.iterations[index])
    rows = list(dict.fromkeys(row for _, row, *_ in bars))
    figure = go.Figure()
    for kind, color in _COLORS.items():
        mine = [bar[1:] for bar in bars if bar[0] == kind and bar[3] > bar[2]]
        figure.add_bar(
            name=kind,
            orientation="h",
            marker={"color": color, "line": {"color": "white", "width": 1}},
            opacity=0.8,  # two messages may be under way at once
            y=[row for row, _, _, _ in mine],
            base=[start_s * MS for _, start_s, _, _ in mine],
            x=[(end_s - start_s) * MS for _, start_s, end_s, _ in mine],
            hovertext=[
                f"{text}<br>{start_s * MS:.2f} to {end_s * MS:.2f} ms"
                for _, start_s, end_s, text in mine
            ],
            hoverinfo="text",
        )
    figure.update_layout(barmode="overlay", height=75 + 34 * len(rows))
    figure.update_xaxes(title="ms", rangemode="tozero")
    return figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1])


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
        text += f"<br>ready at {max(times) * MS:.2f} ms" if times else ""
        bars.append((_PACKING, link, at["start_s"], at["packed_s"], f"packing {text}"))
        bars.append((_MESSAGES, link, at["packed_s"], at["end_s"], text))
    return bars


def _predicted_bars(predicted: IterationForecast, trace: Trace) -> list[Bar]:
    """The prediction on the same clock: its backward starts after forward."""
    begin_s = trace.other_s + trace.forward_s
    end_s = min(predicted.iteration_s, begin_s + predicted.backward_end_s)
    bars = _compute_bars("predicted compute", (begin_s, end_s, predicted.iteration_s))
    for index, why in enumerate(reasons(predicted)):
        group, at = predicted.plan.groups[index], predicted.groups[index]
        text = f"group {index}: {group.operation.value} of {size(at.nbytes)}<br>{_plain(why, 200)}"
        start_s, end_s = begin_s + at.start_s, begin_s + at.end_s
        bars.append((_MESSAGES, "predicted messages", start_s, end_s, text))
    return bars


def _legend(figure: Any) -> str:
    """Names and colours of a figure as a list, which wraps on a narrow screen."""
    entries = []
    for drawn in (*figure.data, *figure.layout.shapes):
        kind = "line"
        if getattr(drawn, "mode", None) == "markers":
            kind = "point"
        elif drawn.type == "bar":
            kind = "bar"
        has_line = drawn.line.color if kind == "line" else None
        dash = "dashed" if kind == "line" and drawn.line.dash else "solid"
        swatch = f'class="{kind}" style="color: {has_line or drawn.marker.color}; --dash: {dash}"'
        entries.append(f"<li><span {swatch}></span>{escape(drawn.name)}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _plain(text: str, longest: int = 60) -> str:
    """An external name as a label: no markup, limited length."""
    return escape(text if len(text) <= longest else text[: longest - 3] + "...", quote=False)


class Chapter(NamedTuple):
    """Figures of one subject; the verdict is the main result in one sentence.

    Sections are a heading, one or two sentences that explain the figure, and Plotly's figure.
    """

    heading: str = ""
    verdict: str = ""
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    sections: Sequence[tuple[str, str, Any]] = ()


def write_page(path: str, title: str, chapters: Sequence[Chapter]) -> None:
    """Write an HTML page, replacing the file; all text is escaped."""
    parts = []
    for chapter in chapters:
        parts += [f"<h2>{escape(chapter.heading)}</h2>", f"<p><b>{escape(chapter.verdict)}</b></p>"]
        rows = (f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in chapter.facts)
        parts += ["<table>", *rows, "</table>"]
        parts += [f"<p>{escape(note)}</p>" for note in chapter.notes]
        for heading, explanation, figure in chapter.sections:
            parts += [f"<h3>{escape(heading)}</h3>", f"<p>{escape(explanation)}</p>"]
            parts.append(_legend(figure))
            figure.update_layout(showlegend=False, margin=MARGIN)
            settings = {"responsive": True, "displaylogo": False}
            parts.append(figure.to_html(settings, full_html=False, include_plotlyjs=False))
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    text = template.substitute(title=escape(title), library=get_plotlyjs(), body="\n".join(parts))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk's error names no file
        raise OSError(error.errno, error.strerror, str(path)) from None

"""One iteration of every rank on one clock: computation above, messages below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from wfbp.cli.figures import MS, Figure, axis, figure, plain
from wfbp.cli.forecast import Forecast
from wfbp.cli.run_files import Iteration, RankRun, Run
from wfbp.cli.tables import size
from wfbp.core.trace import Trace

_ROW_PIXELS = 34
_MOST_READY = 2000


class _Bar(NamedTuple):
    row: str
    start_s: float
    end_s: float
    text: str


def gantt(run: Run, predicted: Forecast | None) -> Figure | None:
    """The Gantt chart of one iteration, of median length among those recorded; None without one on
    all ranks.

    Every rank's clock starts when it had the previous iteration's gradients in hand, which is
    nearly the same moment on all ranks, since the last message ends together. A prediction becomes
    two more rows.
    """
    index = median_iteration(run)
    if index is None:
        return None
    bars: dict[str, list[_Bar]] = {}
    ready: list[_Bar] = []
    rows: list[str] = []
    trace = run.ranks[0].trace
    if predicted is not None and trace is not None:
        rows += _predicted_rows(predicted, trace, bars)
    for rank in run.ranks:
        rows += _rank_rows(rank, rank.iterations[index], bars, ready)
    return _chart("ms since the previous iteration's gradients were in hand", rows, bars, ready)


def _chart(
    title: str, rows: Sequence[str], bars: dict[str, list[_Bar]], ready: Sequence[_Bar]
) -> Figure:
    data = [_bars(kind, color, width, bars[kind]) for kind, color, width in _KINDS if kind in bars]
    data.append(_ready_marks(ready))
    return figure(
        data,
        axis(title, rangemode="tozero"),
        {"categoryorder": "array", "categoryarray": rows[::-1], "automargin": True},
        barmode="overlay",
        height=120 + _ROW_PIXELS * len(rows),
        hovermode="closest",
    )


_FORWARD, _BACKWARD, _WAITING = "forward and the rest", "backward", "waiting for communication"
_UPDATE = "update"
_PACKING, _EVEN, _ODD = "packing", "messages", "messages (every other)"
_KINDS = (
    (_FORWARD, "@forward", 0.8),
    (_BACKWARD, "@backward", 0.8),
    (_UPDATE, "@update", 0.8),
    (_WAITING, "@exposed", 0.8),
    (_PACKING, "@packing", 0.8),
    (_EVEN, "@link", 0.8),
    (_ODD, "@link2", 0.5),
)
"""With colour and width: two messages may be under way at once, so every other one is thinner."""


def step_of_timeline(document: dict[str, Any], optimizer: str) -> tuple[int, Figure] | None:
    """The number and Gantt chart of one step of a timeline, of median length; None without one on
    all ranks."""
    rows_of = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in document["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    spans: dict[int, dict[int, list[dict[str, Any]]]] = {}
    for event in document["traceEvents"]:
        step = event.get("args", {}).get("step")
        row = rows_of.get((event["pid"], event["tid"]), "")
        if step is not None and row.rpartition(":")[0] == optimizer:
            spans.setdefault(step, {}).setdefault(event["pid"], []).append(event)
    ranks = sorted({rank for of_step in spans.values() for rank in of_step})
    whole = {step: of_step for step, of_step in spans.items() if len(of_step) == len(ranks)}
    if not whole:
        return None
    lengths = sorted((_length_us(of_step), step) for step, of_step in whole.items())
    chosen = lengths[(len(lengths) - 1) // 2][1]
    begin_us = min(e["ts"] for events in whole[chosen].values() for e in events)
    bars: dict[str, list[_Bar]] = {}
    ready: list[_Bar] = []
    rows: list[str] = []
    for rank in ranks:
        names = {name: f"rank {rank} {name}" for name in ("training", "messages")}
        rows += names.values()
        for event in whole[chosen][rank]:
            start_s = (event["ts"] - begin_us) * 1e-6
            if event["ph"] == "i":
                text = f"gradient of {plain(event['name'])}"
                ready.append(_Bar(names["training"], start_s, start_s, text))
                continue
            kind, text = _span_kind(event)
            row = names["messages" if kind in (_PACKING, _EVEN, _ODD) else "training"]
            _add(bars, kind, row, start_s, start_s + event["dur"] * 1e-6, text)
    return chosen, _chart("ms since the step began", rows, bars, ready[:_MOST_READY])


def _length_us(of_step: dict[int, list[dict[str, Any]]]) -> float:
    events = [event for of_rank in of_step.values() for event in of_rank]
    first_us = min(event["ts"] for event in events)
    return float(max(event["ts"] + event.get("dur", 0.0) for event in events) - first_us)


def _span_kind(event: dict[str, Any]) -> tuple[str, str]:
    """What a span of a timeline is here, and what is said of it."""
    name, facts = event["name"], event["args"]
    if "group" in facts:
        text = f"group {facts['group']}: {name}, {facts['tensors']} tensors, {size(facts['bytes'])}"
        return _PACKING if name == "pack" else _ODD if facts["group"] % 2 else _EVEN, text
    if name.startswith("wait"):
        return _WAITING, name
    if "backward" in name:
        return _BACKWARD, name
    return _UPDATE if name == "update" else _FORWARD, name


def median_iteration(run: Run) -> int | None:
    """The index of the iteration of median length, from the end (-1 is the last)."""
    count = min(len(rank.iterations) for rank in run.ranks)
    lengths = [(max(r.iterations[i].done_s for r in run.ranks), i) for i in range(-count, 0)]
    return sorted(lengths)[(count - 1) // 2][1] if lengths else None


def _rank_rows(
    rank: RankRun, iteration: Iteration, bars: dict[str, list[_Bar]], ready: list[_Bar]
) -> list[str]:
    compute, link = f"rank {rank.rank} compute", f"rank {rank.rank} messages"
    closed_s, done_s = iteration.closed_s, iteration.done_s
    begun = [at for at in iteration.ready_s if at is not None]
    forward_end_s = 0.0
    if rank.trace is not None:
        # Forward is timed while profiling only; what the trace says of it holds here too.
        forward_end_s = min([rank.trace.other_s + rank.trace.forward_s, closed_s, *begun])
    _add(bars, _FORWARD, compute, 0.0, forward_end_s, "forward, optimizer, data")
    _add(bars, _BACKWARD, compute, forward_end_s, closed_s, "backward")
    _add(bars, _WAITING, compute, closed_s, done_s, "nothing left to compute")
    for stamps in iteration.groups:
        text = _group_text(rank, iteration, stamps.group)
        kind = _ODD if stamps.group % 2 else _EVEN
        _add(bars, _PACKING, link, stamps.start_s, stamps.packed_s, f"packing {text}")
        _add(bars, kind, link, stamps.packed_s, stamps.end_s, text)
    if len(iteration.ready_s) <= _MOST_READY:
        for spec, at in zip(rank.plan.tensors, iteration.ready_s, strict=True):
            if at is not None:
                ready.append(_Bar(compute, at, at, f"gradient of {plain(spec.name)}"))
    return [compute, link]


def _group_text(rank: RankRun, iteration: Iteration, group: int) -> str:
    members = rank.plan.groups[group].tensors
    names = [plain(rank.plan.tensors[k].name) for k in members]
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    nbytes = sum(rank.plan.tensors[k].nbytes for k in members)
    times = [at for k in members if (at := iteration.ready_s[k]) is not None]
    ready = f"<br>ready at {max(times) * MS:.3f} ms" if times else ""
    operation = rank.plan.groups[group].operation.value
    return f"group {group}: {operation} of {size(nbytes)}<br>{listed}{ready}"


def _predicted_rows(predicted: Forecast, trace: Trace, bars: dict[str, list[_Bar]]) -> list[str]:
    """The prediction on the same clock: here backward starts where forward has ended."""
    compute, link = "predicted compute", "predicted messages"
    begin_s = trace.other_s + trace.forward_s
    compute_end_s = min(predicted.iteration_s, begin_s + predicted.backward_end_s)
    _add(bars, _FORWARD, compute, 0.0, begin_s, "forward, optimizer, data")
    _add(bars, _BACKWARD, compute, begin_s, compute_end_s, "backward")
    _add(bars, _WAITING, compute, compute_end_s, predicted.iteration_s, "nothing left to compute")
    for index, group in enumerate(predicted.groups):
        text = f"group {index}: {group.operation.value} of {size(group.nbytes)}<br>{group.why}"
        kind = _ODD if index % 2 else _EVEN
        _add(bars, kind, link, begin_s + group.start_s, begin_s + group.end_s, plain(text, 200))
    return [compute, link]


def _add(
    bars: dict[str, list[_Bar]], kind: str, row: str, start_s: float, end_s: float, text: str
) -> None:
    if end_s > start_s:
        bars.setdefault(kind, []).append(_Bar(row, start_s, end_s, text))


def _bars(name: str, color: str, width: float, rows: Sequence[_Bar]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "width": width,
        "y": [bar.row for bar in rows],
        "base": [bar.start_s * MS for bar in rows],
        "x": [(bar.end_s - bar.start_s) * MS for bar in rows],
        "customdata": [[bar.start_s * MS, bar.end_s * MS, bar.text] for bar in rows],
        "hovertemplate": (
            "%{customdata[2]}<br>%{customdata[0]:.3f} to %{customdata[1]:.3f} ms"
            " (%{x:.3f} ms)<extra></extra>"
        ),
        "marker": {"color": color, "line": {"color": "@paper", "width": 1}},
    }


def _ready_marks(rows: Sequence[_Bar]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "gradient exists",
        "x": [bar.start_s * MS for bar in rows],
        "y": [bar.row for bar in rows],
        "text": [bar.text for bar in rows],
        "hovertemplate": "%{text}<br>%{x:.3f} ms<extra></extra>",
        "marker": {"symbol": "line-ns", "size": 9, "line": {"width": 1, "color": "@ink"}},
    }

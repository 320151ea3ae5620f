"""The same model on more workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wfbp.cli.figures import MS, Figure, axis, figure, line_style, marker
from wfbp.sim.sweep import SweepRow


def scaling(sweeps: Mapping[str, Sequence[SweepRow]]) -> Figure:
    """Share of the iteration that computes, by workers; a line per schedule, and a menu of
    algorithms."""
    data: list[dict[str, Any]] = []
    owners: list[str] = []
    for algorithm, rows in sweeps.items():
        schedules = list(dict.fromkeys(row.schedule for row in rows))
        for index, schedule in enumerate(schedules):
            mine = [row for row in rows if row.schedule == schedule]
            data.append(_line(schedule, index, mine, algorithm == next(iter(sweeps))))
            owners.append(algorithm)
    layout: dict[str, Any] = {"height": 460, "hovermode": "x unified"}
    if len(sweeps) > 1:
        layout["updatemenus"] = [_menu(list(sweeps), owners)]
        layout["margin"] = {"b": 110}
    return figure(
        data,
        axis("workers", type="log", **_ticks(sweeps)),
        axis("share of the iteration that computes", tickformat=".0%", rangemode="tozero"),
        **layout,
    )


def coinciding(rows: Sequence[SweepRow]) -> list[list[str]]:
    """Schedules whose lines lie upon one another: within 0.5% for every number of workers."""
    lines: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row.workers):
        lines.setdefault(row.schedule, []).append(row.iteration_s)
    groups: list[list[str]] = []
    for name, times in lines.items():
        for group in groups:
            pairs = zip(lines[group[0]], times, strict=True)
            if all(abs(a - b) <= 0.005 * a for a, b in pairs):
                group.append(name)
                break
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1]


def _line(name: str, index: int, rows: Sequence[SweepRow], visible: bool) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [row.workers for row in rows],
        "y": [row.efficiency for row in rows],
        "customdata": [[row.iteration_s * MS, row.num_groups] for row in rows],
        "hovertemplate": "%{y:.1%}, %{customdata[0]:.3f} ms, %{customdata[1]} messages",
        "line": line_style(index),
        "marker": marker(index),
        "visible": visible,
    }


def _ticks(sweeps: Mapping[str, Sequence[SweepRow]]) -> dict[str, Any]:
    counts = sorted({row.workers for rows in sweeps.values() for row in rows})
    return {"tickmode": "array", "tickvals": counts, "ticktext": [str(count) for count in counts]}


def _menu(algorithms: Sequence[str], owners: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "buttons",
        "direction": "right",
        "x": 0,
        "xanchor": "left",
        "y": -0.2,
        "yanchor": "top",
        "buttons": [
            {
                "label": name.replace("_", "-"),
                "method": "update",
                "args": [{"visible": [owner == name for owner in owners]}],
            }
            for name in algorithms
        ],
    }

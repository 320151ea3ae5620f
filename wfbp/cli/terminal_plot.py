"""A small scatter plot made of characters, with logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

MARKERS = "●▲■◆"
COLORS = ("cyan", "yellow", "green", "magenta")


class Series(NamedTuple):
    """Points of one kind, and the line that was fitted to them; all above 0."""

    name: str
    points: Sequence[tuple[float, float]]
    line: Callable[[float], float]


class _Scale(NamedTuple):
    """From values to cells, even in the logarithm."""

    low: float
    high: float
    cells: int

    def cell(self, value: float) -> int:
        span = math.log(self.high / self.low)
        share = math.log(value / self.low) / span if span else 0.5
        return min(self.cells - 1, max(0, round(share * (self.cells - 1))))

    def value(self, cell: int) -> float:
        return float(self.low * (self.high / self.low) ** (cell / max(1, self.cells - 1)))


def scatter(
    series: Sequence[Series],
    x_label: Callable[[float], str],
    y_label: Callable[[float], str],
    width: int = 72,
    height: int = 18,
) -> list[list[tuple[str, str]]]:
    """Plot points, with dots along the fitted lines, ``width`` by ``height`` characters without
    labels.

    Later series lie above earlier ones, points above lines. Returns lines from top to bottom, each
    as pairs of text and colour. Raises ``ValueError`` for no points, or one that has no logarithm.

    Example:
        >>> plot = scatter([Series("a", [(1, 1), (100, 10)], lambda x: x**0.5)], str, str, 3, 3)
        >>> for line in plot:
        ...     print("".join(text for text, _ in line).rstrip())
        10 |  ●
           | ·
         1 |●
           +---
            1.0
        ● a
    """
    points = [point for one in series for point in one.points]
    if not points or min(min(point) for point in points) <= 0:
        raise ValueError("expected points above 0")
    x = _Scale(min(p[0] for p in points), max(p[0] for p in points), width)
    y = _Scale(min(p[1] for p in points), max(p[1] for p in points), height)
    grid = [[(" ", "")] * width for _ in range(height)]
    for index, one in enumerate(series):
        for column in range(width):
            fitted = one.line(x.value(column))
            if y.low <= fitted <= y.high:
                grid[y.cell(fitted)][column] = ("·", COLORS[index % len(COLORS)])
    for index, one in enumerate(series):
        style = MARKERS[index % len(MARKERS)], COLORS[index % len(COLORS)]
        for point in one.points:
            grid[y.cell(point[1])][x.cell(point[0])] = style
    labels = {0: y_label(y.low), height // 2: y_label(y.value(height // 2)), height - 1: ""}
    labels[height - 1] = y_label(y.high)
    if height < 5:
        labels.pop(height // 2, None)
    margin = max(map(len, labels.values()))
    lines = [
        [(f"{labels.get(row, ''):>{margin}} |", ""), *grid[row]] for row in reversed(range(height))
    ]
    lines.append([(f"{'':>{margin}} +{'-' * width}", "")])
    lines.append([(f"{'':>{margin}}  {_below(x, x_label)}", "")])
    for index, one in enumerate(series):
        marker, color = MARKERS[index % len(MARKERS)], COLORS[index % len(COLORS)]
        lines.append([(marker, color), (f" {one.name}", "")])
    return lines


def _below(x: _Scale, label: Callable[[float], str]) -> str:
    """Labels under the axis: as many as fit side by side."""
    text = ""
    step = max(12, x.cells // 5)
    for column in range(0, x.cells, step):
        text = text.ljust(column) + label(x.value(column))
    return text

"""Figures for the pages that ``wfbp`` writes, one module each.

A figure is plain data in Plotly's form, of which ``plot.js`` draws what is used here. Colours are
names, ``@backward`` and the like: the page puts in what suits its light or dark theme
(``page.html``).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

Figure = dict[str, Any]
"""``{"data": [...], "layout": {...}}``."""

NUM_SERIES = 9
MS = 1e3


def figure(
    data: Sequence[dict[str, Any]], x: dict[str, Any], y: dict[str, Any], **layout: Any
) -> Figure:
    """A figure with these traces, axes and layout, its legend above it."""
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    return {"data": list(data), "layout": {"xaxis": x, "yaxis": y, "legend": legend, **layout}}


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """An axis with a title."""
    return {"title": {"text": title}, **settings}


def series(index: int) -> str:
    """The colour of the index-th of several equals.

    >>> series(0), series(9)
    ('@series0', '@series0')
    """
    return f"@series{index % NUM_SERIES}"


def line_style(index: int) -> dict[str, Any]:
    """Colour, dashes and width of the index-th line, so that lines that coincide are all seen.

    The first is the widest and solid; those drawn over it are thinner and leave gaps.
    """
    dashes = ("solid", "dash", "dot", "dashdot", "longdash")
    return {
        "color": series(index),
        "dash": dashes[index % len(dashes)],
        "width": max(1.5, 6.0 - 0.6 * index),
    }


def marker(index: int) -> dict[str, Any]:
    """The shape of the index-th series' points."""
    symbols = ("circle", "square", "diamond", "triangle-up", "x", "triangle-down", "cross")
    return {"symbol": symbols[index % len(symbols)], "size": 8}


def plain(text: str, longest: int = 60) -> str:
    """A name from outside as text for a label: no markup, not too long.

    >>> plain("<b>w</b>")
    '&lt;b&gt;w&lt;/b&gt;'
    """
    return html.escape(text if len(text) <= longest else text[: longest - 3] + "...", quote=False)

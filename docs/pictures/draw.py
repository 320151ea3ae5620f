"""Draws one training step under each schedule, from timelines of real runs.

    python docs/pictures/draw.py            # as root: record the runs, and draw them
    python docs/pictures/draw.py --drawn-from runs/pictures

Two ranks on one machine train ``train.py`` over a link of 500 Mbit/s between two network namespaces
(``launch/link.py``), once by each schedule, with ``WFBP_RECORD``. Of each run the step whose time
is the median of the last twenty is drawn as rank 0 saw it, all on one scale, as ``SCHEDULE.svg``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
SCHEDULES = ("single", "layerwise", "threshold", "oasr", "hybrid")
LAST_STEPS = 20
WIDTH, LEFT, RIGHT = 560, 92, 12
ROW, GAP, TOP, AXIS = 24, 8, 6, 20
COLOURS = {
    "compute": "#4c78a8",
    "update": "#1d3557",
    "wait": "#e45756",
    "ready": "#333333",
    "all_reduce": "#f2a541",
    "reduce_scatter": "#f2a541",
    "all_gather": "#72b7b2",
}

Span = tuple[str, int, float, float]
"""Colour's name, row, start and end in ms from the start of the step."""


def record(folder: Path, schedules: tuple[str, ...] = SCHEDULES) -> None:
    """Run each schedule over the link, each into a folder named after it."""
    link = [sys.executable, str(HERE.parents[1] / "launch" / "link.py")]
    for schedule in schedules:
        settings = {"WFBP_SCHEDULE": schedule, "WFBP_RECORD": str(folder / schedule)}
        settings |= {"WFBP_THRESHOLD_BYTES": "4M", "OMP_NUM_THREADS": "1"}
        program = ["--", sys.executable, str(HERE / "train.py")]
        subprocess.run(
            [*link, "run", "--rate", "500mbit", "-np", "2", "--expect-bytes", "1000000", *program],
            env={**os.environ, **settings},
            check=True,
        )


def median_step(events: list[dict[str, Any]]) -> tuple[float, float]:
    """Start and end, in us, of the step of median length among the last ones of rank 0.

    A step is taken to last from the end of one update to the end of the next.
    """
    ends = sorted(e["ts"] + e["dur"] for e in events if e["pid"] == 0 and e["name"] == "update")
    steps = sorted(pairwise(ends), key=lambda step: step[1] - step[0])
    late = [step for step in steps if step[0] >= ends[-LAST_STEPS - 1]]
    return late[len(late) // 2]


def spans_of(events: list[dict[str, Any]], start: float, end: float) -> list[Span]:
    """Spans of rank 0 from ``start`` to ``end``: computing and waiting, gradients, messages."""
    rows = {1: 0, 2: 1, 3: 2, 4: 3}
    spans: list[Span] = []
    for event in events:
        if event["pid"] != 0 or event["ph"] not in "Xi" or event.get("tid") not in rows:
            continue
        first, last = event["ts"], event["ts"] + event.get("dur", 0.0)
        if last <= start or first >= end:
            continue
        name = event["name"]
        if event["tid"] == 2:
            kind = "ready"
        elif name in ("all_reduce", "reduce_scatter", "all_gather", "update"):
            kind = name
        elif name.startswith("wait"):
            kind = "wait"
        elif name == "pack":
            continue
        else:
            kind = "compute"
        clipped = (max(first, start) - start) / 1e3, (min(last, end) - start) / 1e3
        spans.append((kind, rows[event["tid"]], *clipped))
    order = ("compute", "update", "wait")
    return sorted(spans, key=lambda span: order.index(span[0]) if span[0] in order else 9)


def rectangle(x: float, y: float, width: float, colour: str, more: str = "") -> str:
    """One bar of a row."""
    size = f'width="{width:.1f}" height="{ROW}"'
    return f'<rect x="{x:.1f}" y="{y}" {size} fill="{colour}"{more}/>'


def svg(title: str, spans: list[Span], step_ms: float, scale_ms: float) -> str:
    """One step as a picture; ``scale_ms`` is the length of the axis."""
    labels = ("training", "gradients", "messages", "")
    bottom = TOP + len(labels) * (ROW + GAP)
    pixels = (WIDTH - LEFT - RIGHT) / scale_ms
    body = []
    for row, label in enumerate(labels):
        y = TOP + row * (ROW + GAP)
        body.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{label}</text>')
        body.append(rectangle(LEFT, y, WIDTH - LEFT - RIGHT, "#f3f4f6"))
    for kind, row, first, last in spans:
        x, y = LEFT + first * pixels, TOP + row * (ROW + GAP)
        width = max((last - first) * pixels, 1.0)
        edge = ' stroke="#ffffff" stroke-width="0.6"' if row >= 2 else ""
        body.append(rectangle(x, y, width, COLOURS[kind], edge))
    x = LEFT + step_ms * pixels
    body.append(f'<path d="M{x:.1f} {TOP - 4}V{bottom}" stroke="#111111" stroke-dasharray="3 3"/>')
    for ms in range(0, int(scale_ms) + 1, 50):
        x = LEFT + ms * pixels
        body.append(f'<text x="{x:.1f}" y="{bottom + 10}" text-anchor="middle">{ms}</text>')
    body.append(f'<text x="{LEFT - 8}" y="{bottom + 10}" text-anchor="end">ms</text>')
    height = bottom + AXIS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title>"
        "<style>text{font:12px system-ui,sans-serif;fill:#333333}</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>' + "\n".join(body) + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drawn-from", type=Path, help="timelines of an earlier run")
    options = parser.parse_args()
    folder = options.drawn_from or Path("runs/pictures")
    if options.drawn_from is None:
        record(folder)
    steps = {}
    for schedule in SCHEDULES:
        document = json.loads((folder / schedule / "timeline.json").read_text())
        steps[schedule] = document["traceEvents"], *median_step(document["traceEvents"])
    scale_ms = 1.02 * max(end - start for _, start, end in steps.values()) / 1e3
    for schedule, (events, start, end) in steps.items():
        step_ms = (end - start) / 1e3
        title = f"One step by the schedule {schedule}: {step_ms:.0f} ms"
        picture = svg(title, spans_of(events, start, end), step_ms, scale_ms)
        (HERE / f"{schedule}.svg").write_text(picture)
        print(title)


if __name__ == "__main__":
    main()

"""Draws one training step under each schedule, from timelines of real runs.

    python docs/pictures/draw.py                         # draw the steps of steps.json again
    python docs/pictures/draw.py --record runs/pictures  # as root: record new runs, then draw
    python docs/pictures/draw.py --read runs/pictures    # draw runs that were recorded earlier

Two ranks on one machine train ``train.py`` over a link of 500 Mbit/s between two network namespaces
(``tools/link.py``), once by each schedule, with ``WFBP_RECORD``. Of each run, ``steps.json`` keeps
the step whose time is the median of the last twenty, as rank 0 saw it. All are drawn on one scale,
as ``SCHEDULE.svg``; ``overlap.svg`` compares two of them. ``pays.svg`` is a prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from wfbp.core.cost import Costs, LinearCost
from wfbp.core.planners import plan
from wfbp.core.timeline import iteration_s
from wfbp.core.trace import Trace

HERE = Path(__file__).parent
SCHEDULES = ("single", "layerwise", "threshold", "oasr", "hybrid")
STEPS = HERE / "steps.json"
FORMAT = "wfbp-pictures/1"
SETUP = "two ranks on two cores, 500 Mbit/s between them, 16 layers, 9.5 MB of gradients"
COMPARED = {
    "single": "All gradients in one message after backward",
    "hybrid": "Messages during backward and the next forward",
}
"""The schedules of ``overlap.svg``, with their headings."""
LAST_STEPS = 20
WIDTH, LEFT, RIGHT = 560, 92, 12
ROW, GAP, TOP, AXIS, HEADING, LEGEND = 24, 8, 6, 20, 24, 26
COLOURS = {
    "compute": "#4c78a8",
    "update": "#1d3557",
    "wait": "#e45756",
    "ready": "#333333",
    "reduce": "#f2a541",
    "gather": "#72b7b2",
}
KINDS = {
    "update": "update",
    "all_reduce": "reduce",
    "reduce_scatter": "reduce",
    "all_gather": "gather",
}
LEGENDS = {
    "compute": "computes",
    "wait": "waits",
    "update": "updates",
    "reduce": "all-reduce, reduce-scatter",
    "gather": "all-gather",
}

BUSY = {0.0: "#4c78a8", 0.2: "#72b7b2", 0.5: "#f2a541", 0.9: "#e45756"}
"""Parts of a core that the messages of ``pays.svg`` take, and the colours of their lines."""
FORWARD_MS, BACKWARD_MS, START_MS = 50.0, 100.0, 0.2
"""Of its model of 52 equal tensors; and the start-up time of a message."""
PLOT, LEAST, MOST = 200, 0.5, 1.0
"""Height of its plot, and the ratios at its bottom and top."""

Span = tuple[str, int, float, float]
"""Kind, row, start and end in ms from the start of the step."""


class Step(NamedTuple):
    """One training step of rank 0."""

    step_ms: float
    spans: list[Span]


def record(folder: Path) -> None:
    """Run each schedule over the link, each into a folder named after it."""
    link = [sys.executable, str(HERE.parents[1] / "tools" / "link.py")]
    for schedule in SCHEDULES:
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
        elif name in KINDS:
            kind = KINDS[name]
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


def read(folder: Path) -> dict[str, Step]:
    """The median step of each recorded run."""
    steps = {}
    for schedule in SCHEDULES:
        events = json.loads((folder / schedule / "timeline.json").read_text())["traceEvents"]
        start, end = median_step(events)
        spans = [
            (kind, row, round(first, 2), round(last, 2))
            for kind, row, first, last in spans_of(events, start, end)
        ]
        steps[schedule] = Step(round((end - start) / 1e3, 1), spans)
    return steps


def save(steps: dict[str, Step]) -> None:
    """Write ``steps.json``, a span in each line."""
    told = ",\n".join(
        f'"{schedule}": {{"step_ms": {step.step_ms}, "spans": [\n'
        + ",\n".join(map(json.dumps, step.spans))
        + "]}"
        for schedule, step in steps.items()
    )
    STEPS.write_text(f'{{\n"format": "{FORMAT}",\n"setup": "{SETUP}",\n"steps": {{\n{told}\n}}}}\n')


def load() -> dict[str, Step]:
    """Read ``steps.json``."""
    steps = json.loads(STEPS.read_text())["steps"]
    return {
        schedule: Step(step["step_ms"], [tuple(span) for span in step["spans"]])
        for schedule, step in steps.items()
    }


def rectangle(x: float, y: float, width: float, colour: str, more: str = "") -> str:
    """One bar of a row."""
    size = f'width="{width:.1f}" height="{ROW}"'
    return f'<rect x="{x:.1f}" y="{y}" {size} fill="{colour}"{more}/>'


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def panel(step: Step, top: int, scale_ms: float) -> tuple[list[str], int]:
    """The rows and the axis of one step, and the height where the next may begin."""
    labels = ("training", "gradients", "messages", "")
    bottom = top + len(labels) * (ROW + GAP)
    pixels = (WIDTH - LEFT - RIGHT) / scale_ms
    body = []
    for row, label in enumerate(labels):
        y = top + row * (ROW + GAP)
        body.append(text(LEFT - 8, y + 16, label, "end"))
        body.append(rectangle(LEFT, y, WIDTH - LEFT - RIGHT, "#f3f4f6"))
    for kind, row, first, last in step.spans:
        x, y = LEFT + first * pixels, top + row * (ROW + GAP)
        width = max((last - first) * pixels, 1.0)
        edge = ' stroke="#ffffff" stroke-width="0.6"' if row >= 2 else ""
        body.append(rectangle(x, y, width, COLOURS[kind], edge))
    x = LEFT + step.step_ms * pixels
    body.append(f'<path d="M{x:.1f} {top - 4}V{bottom}" stroke="#111111" stroke-dasharray="3 3"/>')
    for ms in range(0, int(scale_ms) + 1, 50):
        body.append(text(LEFT + ms * pixels, bottom + 10, f"{ms}", "middle"))
    body.append(text(LEFT - 8, bottom + 10, "ms", "end"))
    return body, bottom + AXIS


def legend(top: int) -> list[str]:
    """A key to the colours, in one line."""
    body, x = [], float(RIGHT)
    for kind, words in LEGENDS.items():
        body.append(
            f'<rect x="{x:.1f}" y="{top + 3}" width="11" height="11" fill="{COLOURS[kind]}"/>'
        )
        body.append(text(x + 15, top + 13, words))
        x += 32 + 6.4 * len(words)
    return body


def svg(title: str, body: Sequence[str], height: int) -> str:
    """A picture on a white ground, so that it can be read on any page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title>"
        "<style>text{font:12px system-ui,sans-serif;fill:#333333}</style>"
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>' + "\n".join(body) + "</svg>\n"
    )


def overlap(steps: dict[str, Step], scale_ms: float) -> str:
    """Two steps, one above the other, with headings and a legend."""
    body: list[str] = []
    height = TOP
    for schedule, heading in COMPARED.items():
        step = steps[schedule]
        words = f"{heading}: {step.step_ms:.0f} ms"
        body.append(text(RIGHT, height + 14, words, more=' style="font-weight:bold"'))
        rows, height = panel(step, height + HEADING, scale_ms)
        body += rows
    return svg(
        "One training step without and with overlap", [*body, *legend(height)], height + LEGEND
    )


def ratio(busy: float, network: float) -> float:
    """The best step with overlap over the one without, both predicted, where all gradients take
    ``network`` times as long to send as backward takes to compute."""
    trace = Trace.uniform(ascii_letters, 1_000_000, FORWARD_MS / 52e3, BACKWARD_MS / 52e3)
    rate = network * BACKWARD_MS / 1e3 / sum(trace.backward_bytes)
    costs = Costs(LinearCost(START_MS / 1e3, rate), kappa=busy / (1.0 - busy))
    single, best = (plan(name, trace, costs) for name in ("single", "oasr"))
    return iteration_s(best, trace, costs) / iteration_s(single, trace, costs)


def pays() -> str:
    """A line for each part of a core that messages take: how much of a step overlap leaves."""
    bottom = TOP + HEADING + PLOT
    networks = [10.0 ** (k / 20 - 1) for k in range(41)]
    wide = (WIDTH - LEFT - RIGHT) / (len(networks) - 1)

    def height(part: float) -> float:
        return bottom - PLOT * (part - LEAST) / (MOST - LEAST)

    body = [text(RIGHT, TOP + 12, "step with overlap over step without")]
    for tenth in range(5, 11):
        y = round(height(tenth / 10), 1)
        body.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        body.append(text(LEFT - 8, y + 4, f"{tenth / 10:.1f}", "end"))
    for index, words in {0: "0.1", 20: "1", 40: "10"}.items():
        body.append(text(LEFT + index * wide, bottom + 16, words, "middle"))
    body.append(text(LEFT + 20 * wide, bottom + 34, "time on the network over backward", "middle"))
    key = WIDTH - 150.0
    for row, (busy, colour) in enumerate(BUSY.items()):
        points = [(LEFT + k * wide, height(ratio(busy, x))) for k, x in enumerate(networks)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = bottom - 14 - 16 * (len(BUSY) - 1 - row)
        body.append(f'<path d="M{key} {y - 4}h22" stroke="{colour}" stroke-width="2"/>')
        body.append(text(key + 28, y, f"{busy:.0%} of a core"))
    return svg("When overlap pays", body, bottom + 42)


def drawn(steps: dict[str, Step]) -> dict[str, str]:
    """All pictures by the names of their files."""
    scale_ms = 1.02 * max(step.step_ms for step in steps.values())
    pictures = {"overlap.svg": overlap(steps, scale_ms), "pays.svg": pays()}
    for schedule, step in steps.items():
        title = f"One step by the schedule {schedule}: {step.step_ms:.0f} ms"
        pictures[f"{schedule}.svg"] = svg(title, *panel(step, TOP, scale_ms))
    return pictures


def main() -> None:
    """Record or read the steps, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="run and record first")
    parser.add_argument("--read", type=Path, metavar="FOLDER", help="runs that were recorded")
    options = parser.parse_args()
    if options.record:
        record(options.record)
    if folder := options.record or options.read:
        save(read(folder))
    for name, picture in drawn(load()).items():
        (HERE / name).write_text(picture)


if __name__ == "__main__":
    main()

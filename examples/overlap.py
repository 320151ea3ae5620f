"""Train the same model over a slow link without and with overlap, and show both side by side.

    python examples/overlap.py                 # as root: two ranks over a real link of 450 Mbit/s
    python examples/overlap.py --emulated      # anywhere: one rank, a link that only takes time

The model is the GPT of ``torch_gpt.py``. Without overlap, all gradients travel in one message when
backward has ended (schedule ``single``); with it, they travel while backward and the next forward
compute (schedule ``hybrid``; on the emulated link, which carries no parameters, ``oasr``, which
sends during backward alone).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

HERE = Path(__file__).resolve().parent
LINK = HERE.parent / "launch" / "link.py"
RUNS = {"without overlap": "single", "with overlap": "hybrid"}
LAST_STEPS = 12
BATCH = 8
"""Windows per rank: few, so that a demo takes a minute, and the link is as quick as backward."""
COLUMNS = 64
KINDS = {"wait": "red", "update": "cyan", "compute": "blue", "message": "yellow"}


def train(folder: Path, schedule: str, options: argparse.Namespace, emulated: bool) -> str:
    """Run the GPT by one schedule, with a timeline in the folder; what it printed."""
    program = [sys.executable, str(HERE / "torch_gpt.py")]
    if emulated:
        program = [sys.executable, __file__, "--rank", str(options.mbit)]
    gpt = ["--schedule", schedule, "--steps", str(options.steps), "--batch", str(BATCH)]
    command = program + gpt
    if not emulated:
        link = [sys.executable, str(LINK), "run", "--rate", f"{options.mbit}mbit", "-np", "2"]
        command = [*link, "--", *command]
    settings = {"WFBP_TIMELINE": str(folder), "WFBP_RECORD_DIR": str(folder), "COLUMNS": "100"}
    done = subprocess.run(
        command, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def why_no_link() -> str:
    """Why a real link cannot be made here, as in most containers; empty where it can."""
    if not LINK.exists():
        return "launch/link.py is not here"
    name = ("--name", f"wfbp-try{os.getpid()}")
    done = subprocess.run([sys.executable, LINK, "up", *name], capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().removeprefix("link.py: ")
    subprocess.run([sys.executable, LINK, "down", *name], check=True)
    return ""


def rank(mbit: int, words: list[str]) -> None:
    """The only rank of a run on an emulated link: messages take their time, and nobody else."""
    from wfbp.comm.emulated import EmulatedLink
    from wfbp.core.cost import LinearCost
    from wfbp.runtime import process

    # Between two ranks all bytes cross the link, in each direction.
    process.init(backend=EmulatedLink(LinearCost(4e-4, 8e-6 / mbit)))
    sys.argv = [str(HERE / "torch_gpt.py"), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def median_step(events: list[dict[str, Any]]) -> tuple[float, float]:
    """Start and end, in us, of the step of median length among the last ones of rank 0."""
    ends = sorted(e["ts"] + e["dur"] for e in events if e["name"] == "update")
    steps = list(pairwise(ends))[-LAST_STEPS:]
    return sorted(steps, key=lambda step: step[1] - step[0])[len(steps) // 2]


def kind_of(event: dict[str, Any]) -> str:
    name = event["name"]
    if "group" in event["args"]:
        return "" if name == "pack" else "message"
    return "wait" if name.startswith("wait") else "update" if name == "update" else "compute"


def bar(events: list[dict[str, Any]], kinds: tuple[str, ...], span: tuple[float, float]) -> Text:
    """One row of a step: a character per part of it, in the colour of what happens there."""
    start, per_column = span
    cells = [" "] * COLUMNS
    for kind in kinds:  # later ones lie above
        for event in events:
            if kind_of(event) == kind:
                first = (event["ts"] - start) / per_column
                last = (event["ts"] + event["dur"] - start) / per_column
                for column in range(max(0, round(first)), min(COLUMNS, round(last))):
                    cells[column] = kind
    line = Text()
    for cell in cells:
        line.append("█" if cell in KINDS else " ", style=KINDS.get(cell, ""))
    return line


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank(int(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, default=450, help="of the link, per second")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--emulated", action="store_true", help="make no real link")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="of pages and data")
    options = parser.parse_args()
    console = Console()
    refused = "" if options.emulated else why_no_link()
    emulated = options.emulated or bool(refused)
    if refused:
        console.print(f"No real link can be made here ({refused}): it is emulated, with one rank.")
    results = {}
    for name, schedule in RUNS.items():
        if emulated and schedule == "hybrid":
            schedule = "oasr"  # an emulated link returns a rank's own data: averages, but no shards
        console.print(f"{name}: {options.steps} steps by schedule {schedule} ...")
        folder = options.output / name.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        printed = train(folder, schedule, options, emulated)
        document = json.loads((folder / "timeline.rank0.json").read_text())
        wfbp = [sys.executable, "-m", "wfbp"]
        subprocess.run([*wfbp, "report", str(folder)], check=True, stdout=subprocess.DEVNULL)
        results[name] = printed, document["traceEvents"]
    show(console, results, "emulated" if emulated else "real")
    for name in RUNS:
        console.print(f"as a page: {options.output / name.replace(' ', '-') / 'report.html'}")


def show(console: Console, results: dict[str, tuple[str, list[dict[str, Any]]]], link: str) -> None:
    """Both runs: a step of each on one scale, and figures."""
    steps = {name: median_step(events) for name, (_, events) in results.items()}
    longest_us = max(end - start for start, end in steps.values())
    figures = Table(title=f"GPT on the standard library, over a slow link ({link})")
    for heading in ("", *results):
        figures.add_column(heading)
    rows: dict[str, list[str]] = {"iteration": [], "of it waiting": [], "loss": []}
    for name, (printed, events) in results.items():
        start, end = steps[name]
        spans = [e for e in events if e["ph"] == "X" and "step" in e.get("args", {})]
        spans = [e for e in spans if e["ts"] < end and e["ts"] + e["dur"] > start]
        waits = [e for e in spans if kind_of(e) == "wait"]
        waited = sum(min(e["ts"] + e["dur"], end) - max(e["ts"], start) for e in waits)
        rows["iteration"].append(f"{(end - start) / 1e3:.0f} ms")
        rows["of it waiting"].append(f"{waited / 1e3:.0f} ms")
        losses = re.search(r"[\d.]+ -> [\d.]+", printed)
        rows["loss"].append(losses.group() if losses else "-")
        console.print(f"\n[bold]{name}[/bold]: one step of rank 0, {(end - start) / 1e3:.0f} ms")
        scale = start, longest_us / COLUMNS
        console.print("  training ", bar(spans, ("compute", "update", "wait"), scale))
        console.print("  messages ", bar(spans, ("message",), scale))
    legend = Text("  ")
    for kind, colour in KINDS.items():
        legend.append("█", style=colour)
        legend.append(f" {kind}  ")
    console.print(legend)
    for label, cells in rows.items():
        figures.add_row(label, *cells)
    console.print(figures)


if __name__ == "__main__":
    main()

"""Train a small GPT by DistributedDataParallel and by wfbp over the same slow link.

    pip install -e ".[mpich,torch,report]"
    python examples/overlap.py             # as root: a link of 450 Mbit/s between two namespaces
    python examples/overlap.py --no-link   # anywhere: two ranks in shared memory

Both train equal models (``torch_gpt.py``) on equal batches in one job, alternately some steps each,
so that other load slows down both. DDP has its default settings. wfbp uses the schedule ``hybrid``,
which sends gradients during backward and parameters during the next forward.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wfbp.runtime.timeline_files import load as load_timeline

HERE = Path(__file__).resolve().parent
LINK = HERE.parent / "tools" / "link.py"
NAMES = ("DDP", "wfbp")
FOLDER = "demo"
"""Of page and data."""
TURN = 6
"""Steps of one model in a row; the first is not timed."""
BATCH = 8
"""Windows per rank: few, so that messages take about as long as backward."""
CONTEXT, WIDTH, DEPTH, RATE = 128, 160, 4, 3e-3
TEXT_BYTES = 1_000_000
COLUMNS = 64
KINDS = {"compute": "blue", "update": "cyan", "wait": "red", "message": "yellow"}
GLYPHS = {"compute": "█", "update": "▓", "wait": "░", "message": "▄"}
"""Told apart where there are no colours."""
MEANINGS = {
    "compute": "forward and backward",
    "update": "update of parameters",
    "wait": "waiting for messages",
    "message": "gradients or parameters in transit",
}

Spans = list[tuple[str, float, float]]
"""Kind, start and end of what happened, in seconds since the epoch."""


class DdpSpans:
    """Makes a model of DDP, and notes when gradients are ready and when messages travel."""

    def __init__(self) -> None:
        self.spans: Spans = []
        self.ready_s = 0.0  # when the last gradient was ready

    def wrap(self, model: Any) -> Any:
        import torch

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.note_gradient)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, self.all_reduce)  # DDP's own all-reduce, with its times
        return wrapped

    def note_gradient(self, parameter: object) -> None:
        self.ready_s = time.time()

    def all_reduce(self, state, bucket):  # DDP refuses annotations other than its own classes
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        start_s = time.time()

        def note(future: Any) -> Any:
            self.spans.append(("message", start_s, time.time()))
            return future.value()

        return allreduce_hook(state, bucket).then(note)

    def note_step(self, start_s: float, closed_s: float, end_s: float) -> None:
        """Note a step whose backward has ended, with all messages, at ``closed_s``."""
        self.spans.append(("compute", start_s, self.ready_s))
        self.spans.append(("wait", self.ready_s, closed_s))
        self.spans.append(("update", closed_s, end_s))


def train(folder: Path, steps: int) -> None:
    """One rank: train by DDP and by wfbp; rank 0 writes losses, times of steps and DDP's spans."""
    import torch
    from torch.nn import functional
    from torch_gpt import GPT, library_text

    import wfbp.torch as wfbp

    wfbp.init()
    torch.distributed.init_process_group(
        "gloo", f"file://{(folder / 'store').resolve()}", rank=wfbp.rank(), world_size=wfbp.size()
    )
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // wfbp.size()))  # one machine
    text = library_text(TEXT_BYTES)
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([characters[c] for c in text]).chunk(wfbp.size())[wfbp.rank()]
    random = torch.Generator().manual_seed(wfbp.rank())
    window = torch.arange(CONTEXT + 1)
    starts = torch.randint(len(tokens) - len(window), (steps, BATCH, 1), generator=random)

    ddp = DdpSpans()
    runs = []
    for name in NAMES:
        torch.manual_seed(0)
        model: Any = GPT(len(characters), CONTEXT, WIDTH, DEPTH, heads=4)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
        if name == "DDP":
            model = ddp.wrap(model)
        else:
            optimizer = wfbp.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters(), schedule="hybrid"
            )
            wfbp.broadcast_parameters(model.state_dict(), root_rank=0)
        warmth = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps + 1)
        runs.append((model, optimizer, warmth))

    losses: list[list[float]] = [[] for _ in runs]
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    for first in range(0, steps, TURN):
        for name, (model, optimizer, warmth) in zip(NAMES, runs, strict=True):
            place = NAMES.index(name)
            for step in range(first, min(first + TURN, steps)):
                start_s = time.time()
                batch = tokens[starts[step] + window]
                logits = model(batch[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()
                closed_s = time.time()
                optimizer.step()
                warmth.step()
                times[place].append((start_s, time.time()))
                if name == "DDP":
                    ddp.note_step(start_s, closed_s, time.time())
                if step in (0, steps - 1):
                    losses[place].append(wfbp.allreduce(loss.detach()).item())  # mean of ranks
    if wfbp.rank() == 0:
        (folder / "measured.txt").write_text(json.dumps([losses, times, ddp.spans]))
    torch.distributed.destroy_process_group()


def start(options: argparse.Namespace, over_link: bool) -> None:
    """Run the ranks, with wfbp's timeline and record in the folder."""
    words = [sys.executable, __file__, "--rank"]
    words += ["--steps", str(options.steps), "--output", str(options.output)]
    if over_link:
        rate = ("--rate", f"{options.mbit}mbit")
        words = [sys.executable, str(LINK), "run", *rate, "-np", "2", "--", *words]
    else:
        beside = Path(sys.executable).with_name("mpirun")
        words = [str(beside) if beside.exists() else "mpirun", "-np", "2", *words]
    folder = str(options.output / FOLDER)
    settings = {"WFBP_RECORD": folder, "WFBP_REPLAN_THRESHOLD": "0"}
    settings["GLOO_SOCKET_IFNAME"] = "lo"  # of DDP in shared memory; link.py sets another
    with subprocess.Popen(words, env={**os.environ, **settings}) as job:
        try:
            code = job.wait()
        except KeyboardInterrupt:  # the terminal interrupts link.py, too: let it remove its network
            job.wait()
            code = 130
    if code:
        sys.exit(code)


def why_no_link() -> str:
    """Why a real link cannot be made here, as in most containers; empty if it can."""
    if not LINK.exists():
        return "tools/link.py is not here"
    name = ("--name", f"wfbp-try{os.getpid()}")
    done = subprocess.run([sys.executable, LINK, "up", *name], capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip().removeprefix("link.py: ")
    subprocess.run([sys.executable, LINK, "down", *name], check=True)
    return ""


class Run(NamedTuple):
    """Measurements of one model on rank 0.

    ``step`` has the spans of the step of median length; times in it count from its start.
    """

    name: str
    step_s: float
    waited_s: float
    losses: list[float]
    step: Spans


def run_of(name: str, losses: list[float], times: list[list[float]], spans: Spans) -> Run:
    """Medians over the later half of the steps, without the first of each turn and the last of all.

    The last update is not in wfbp's timeline, which ends with the last complete step.
    """
    late = [times[k] for k in range(len(times) // 2, len(times) - 1) if k % TURN]
    waits = {
        begin: sum(
            min(last, end) - max(first, begin)
            for kind, first, last in spans
            if kind == "wait" and first < end and last > begin
        )
        for begin, end in late
    }
    begin, end = sorted(late, key=lambda step: step[1] - step[0])[len(late) // 2]
    step = [
        (kind, max(first, begin) - begin, min(last, end) - begin)
        for kind, first, last in spans
        if first < end and last > begin
    ]
    length_s = median(last - first for first, last in late)
    return Run(name, length_s, median(waits.values()), losses, step)


def wfbp_spans(timeline: Path) -> Spans:
    """Of the only optimizer in a timeline of wfbp."""
    events = load_timeline(timeline)["traceEvents"]
    origin_us = events[0]["args"]["start_time_since_epoch_in_micros"]
    spans: Spans = []
    for event in events:
        name, facts = event["name"], event.get("args", {})
        if event["ph"] != "X" or "step" not in facts or name == "pack":
            continue
        if "group" in facts:
            kind = "message"
        elif name.startswith("wait"):
            kind = "wait"
        else:
            kind = "update" if name == "update" else "compute"
        first_us = origin_us + event["ts"]
        spans.append((kind, first_us / 1e6, (first_us + event["dur"]) / 1e6))
    return spans


def bar(run: Run, kinds: tuple[str, ...], longest_s: float) -> Text:
    """One row of a step: a character per part of it, by what happens there."""
    cells = [" "] * COLUMNS
    for kind in kinds:  # later ones cover earlier ones
        for _, first, last in (span for span in run.step if span[0] == kind):
            for column in range(*(round(t / longest_s * COLUMNS) for t in (first, last))):
                cells[min(column, COLUMNS - 1)] = kind
    line = Text()
    for cell in cells:
        line.append(GLYPHS.get(cell, " "), style=KINDS.get(cell, ""))
    return line


def pictures(runs: list[Run]) -> Iterator[Text]:
    """A step of each, on one scale, and what the colours mean."""
    longest_s = max(run.step_s for run in runs)
    for run in runs:
        yield Text(f"\n{run.name}: one step of rank 0, {run.step_s * 1e3:.0f} ms")
        yield Text("  training  ") + bar(run, ("compute", "update", "wait"), longest_s)
        yield Text("  messages  ") + bar(run, ("message",), longest_s)
    legend = Text("  ")
    for kind, colour in KINDS.items():
        legend.append(GLYPHS[kind], style=colour)
        legend.append(f" {kind}  ")
    yield legend


def rows(runs: list[Run]) -> Iterator[tuple[str, ...]]:
    """The figures of both, side by side."""
    yield ("time per step", *(f"{run.step_s * 1e3:.0f} ms" for run in runs))
    yield ("waiting", *(f"{run.waited_s * 1e3:.0f} ms" for run in runs))
    yield ("loss", *(f"{run.losses[0]:.3f} -> {run.losses[-1]:.3f}" for run in runs))


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
  color: #24292f; background: #ffffff }
table { border-collapse: collapse } th, td { padding: .3rem 1.5rem .3rem 0; text-align: left;
  border-bottom: 1px solid #d0d7de } td:nth-child(3) { font-weight: bold }
svg { width: 100% } svg text { font: 12px system-ui, sans-serif; fill: #24292f }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
"""
FILLS = {"compute": "#4c78a8", "update": "#1d3557", "wait": "#e45756", "message": "#f2a541"}
WIDTH_PX, LEFT_PX, ROW_PX = 720, 120, 22


def drawing(runs: list[Run]) -> str:
    """One step of each as a picture, on one scale in milliseconds."""
    longest_ms = 1e3 * max(run.step_s for run in runs)
    scale = (WIDTH_PX - LEFT_PX - 30) / longest_ms
    parts = []
    for number, run in enumerate(runs):
        for row, kinds in enumerate((("compute", "update", "wait"), ("message",))):
            y = (3 * number + row) * ROW_PX
            label = f"{run.name}, {'messages' if row else 'training'}"
            parts.append(f'<text x="{LEFT_PX - 8}" y="{y + 15}" text-anchor="end">{label}</text>')
            for kind in kinds:
                for _, first, last in (span for span in run.step if span[0] == kind):
                    x, width = LEFT_PX + first * 1e3 * scale, (last - first) * 1e3 * scale
                    size = f'width="{max(width, 1):.1f}" height="{ROW_PX - 3}"'
                    parts.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{FILLS[kind]}"/>')
    bottom = 3 * len(runs) * ROW_PX
    step_ms = next(ms for ms in (20, 50, 100, 200, 500, 1000, 10_000) if longest_ms / ms < 8)
    for ms in range(0, int(longest_ms) + 1, step_ms):
        x = LEFT_PX + ms * scale
        parts.append(f'<path d="M{x:.1f} 0V{bottom - 16}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom}" text-anchor="middle">{ms} ms</text>')
    size = f'viewBox="0 0 {WIDTH_PX} {bottom + 6}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'


def page(runs: list[Run], where: str) -> str:
    """All of it as an HTML page."""
    cells = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows(runs)
    )
    keys = "".join(
        f'<span class="key" style="background: {FILLS[kind]}"></span>{meaning}'
        for kind, meaning in MEANINGS.items()
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>wfbp and DDP</title><style>{STYLE}</style></head>
<body><h1>The same training by DDP and by wfbp</h1>
<p>Two ranks train a small GPT {where}, alternately by PyTorch's DistributedDataParallel with its
default settings and by wfbp with the schedule <code>hybrid</code>. Model, data and random numbers
are the same, and so are the losses.</p>
<table><tr><th></th><th>{"</th><th>".join(NAMES)}</th></tr>{cells}</table>
<h2>One step of each on rank 0</h2>{drawing(runs)}<p>{keys}</p>
<p>DDP waits after backward until its last bucket has arrived. With <code>hybrid</code>, parameters
may also arrive during the next forward.</p>
<p><a href="report.html">Plan, network and all steps of wfbp</a></p></body></html>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, default=450, help="rate of the link per second")
    parser.add_argument("--steps", type=int, default=30, help="of each model")
    parser.add_argument("--no-link", action="store_true", help="train in shared memory")
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), help="the folder demo is made anew there"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.output / FOLDER
    if options.rank:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the process that started it says why
        train(folder, options.steps)
        return
    console = Console()
    refused = "" if options.no_link else why_no_link()
    over_link = not (options.no_link or refused)
    if refused:
        console.print(f"No link can be made here ({refused}): the ranks share memory.")
    where = f"over a link of {options.mbit} Mbit/s" if over_link else "in shared memory"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console.print(f"Two ranks train {where}: {options.steps} steps by DDP, {options.steps} by wfbp")
    start(options, over_link)
    losses, times, ddp_spans = json.loads((folder / "measured.txt").read_text())
    spans = (ddp_spans, wfbp_spans(folder / "timeline.rank0.json"))
    runs = [run_of(*measured) for measured in zip(NAMES, losses, times, spans, strict=True)]
    for line in pictures(runs):
        console.print(line)
    table = Table(title=f"A small GPT, {where}")
    for heading in ("", *NAMES):
        table.add_column(heading)
    for row in rows(runs):
        table.add_row(*row)
    console.print(table)
    (folder / "demo.html").write_text(page(runs, where))
    if importlib.util.find_spec("plotly") is None:
        console.print('For the report that the page links: pip install "wfbp[report]"')
    else:
        report = [sys.executable, "-m", "wfbp", "report", str(folder)]
        subprocess.run(report, check=True, stdout=subprocess.DEVNULL)
    console.print(f"As a page: {folder / 'demo.html'}")


if __name__ == "__main__":
    main()

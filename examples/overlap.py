"""Train the same model over a slow link without and with overlap, and show both side by side.

    python examples/overlap.py                 # as root: two ranks over a real link of 450 Mbit/s
    python examples/overlap.py --emulated      # anywhere: one rank, a link that only takes time

The model is the GPT of ``torch_gpt.py``. Without overlap, all gradients travel in one message when
backward has ended (schedule ``single``); with it, they travel while backward and the next forward
compute (schedule ``hybrid``; on the emulated link, which carries no parameters, ``oasr``, which
sends during backward alone). Both train in one job, by turns of some steps: what else the machine
does then slows down both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from wfbp.runtime.timeline import load as load_timeline

HERE = Path(__file__).resolve().parent
LINK = HERE.parent / "launch" / "link.py"
NAMES = ("without overlap", "with overlap")
ROWS = ("AdamW: training", "AdamW-2: training")
"""Of the two optimizers in the timeline, in the order in which they are made."""
FOLDER = "demo"
"""Of page and data."""
TURN = 6
"""Steps of one model in a row."""
BATCH = 8
"""Windows per rank: few, so that a demo takes a minute, and the link is as quick as backward."""
CONTEXT, WIDTH, DEPTH, RATE = 128, 160, 4, 3e-3
TEXT_BYTES = 1_000_000
COLUMNS = 64
KINDS = {"wait": "red", "update": "cyan", "compute": "blue", "message": "yellow"}


def train(folder: Path, steps: int, schedules: list[str]) -> None:
    """One rank: train equal models on equal batches, one by each schedule, and note the losses."""
    import torch
    from torch.nn import functional
    from torch_gpt import GPT, library_text
    from tqdm import tqdm

    import wfbp.torch as wfbp

    wfbp.init()
    # All ranks are on this machine, also where a link is between them.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // wfbp.size()))
    text = library_text(TEXT_BYTES)
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = torch.tensor([characters[c] for c in text]).chunk(wfbp.size())[wfbp.rank()]
    random = torch.Generator().manual_seed(wfbp.rank())
    window = torch.arange(CONTEXT + 1)
    starts = torch.randint(len(tokens) - len(window), (steps, BATCH, 1), generator=random)

    runs = []
    for schedule in schedules:
        torch.manual_seed(0)
        model = GPT(len(characters), CONTEXT, WIDTH, DEPTH, heads=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        optimizer = wfbp.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), schedule=schedule
        )
        wfbp.broadcast_parameters(model.state_dict(), root_rank=0)
        warmth = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps + 1)
        runs.append((model, optimizer, warmth))

    losses: list[list[float]] = [[] for _ in runs]
    with tqdm(total=steps * len(runs), unit="step", disable=wfbp.rank() > 0, mininterval=1) as bar:
        for first in range(0, steps, TURN):
            for (model, optimizer, warmth), told in zip(runs, losses, strict=True):
                for step in range(first, min(first + TURN, steps)):
                    batch = tokens[starts[step] + window]
                    logits = model(batch[:, :-1])
                    loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    warmth.step()
                    bar.update()
                    if step in (0, steps - 1):
                        told.append(wfbp.allreduce(loss.detach()).item())  # mean over the ranks
    if wfbp.rank() == 0:
        (folder / "losses.txt").write_text(json.dumps(losses))


def emulate(mbit: int) -> None:
    """Let this process be the only rank of a job on a link whose messages take their time."""
    from emulated_link import EmulatedLink

    from wfbp import init
    from wfbp.core.cost import LinearCost

    # Between two ranks all bytes cross the link, in each direction.
    init(backend=EmulatedLink(LinearCost(4e-4, 8e-6 / mbit)))


def start(options: argparse.Namespace, emulated: bool) -> None:
    """Run the ranks, with timelines and records in the folder."""
    words = [sys.executable, __file__, "--rank", "--mbit", str(options.mbit)]
    words += ["--steps", str(options.steps), "--output", str(options.output)]
    if emulated:
        words.append("--emulated")
    else:
        rate = ("--rate", f"{options.mbit}mbit")
        words = [sys.executable, str(LINK), "run", *rate, "-np", "2", "--", *words]
    folder = str(options.output / FOLDER)
    settings = {"WFBP_TIMELINE": folder, "WFBP_RECORD_DIR": folder, "WFBP_REPLAN_THRESHOLD": "0"}
    subprocess.run(words, env={**os.environ, **settings}, check=True)


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


class Step(NamedTuple):
    """What one optimizer did in a step; times in us."""

    start: float
    end: float
    spans: list[dict[str, Any]]

    @property
    def length_ms(self) -> float:
        return (self.end - self.start) / 1e3

    @property
    def waited_ms(self) -> float:
        waits = [s for s in self.spans if kind_of(s) == "wait"]
        covered = (min(w["ts"] + w["dur"], self.end) - max(w["ts"], self.start) for w in waits)
        return sum(covered) / 1e3


def quick_step(events: list[dict[str, Any]], row: str) -> Step:
    """One of the later steps of an optimizer: the one at the first quartile of their lengths.

    A step lasts from the end of one update to the end of the next. What else the machine does makes
    steps longer, never shorter.
    """
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    name, training = row.partition(":")[0], rows[row]
    own = {tid for title, tid in rows.items() if title.partition(":")[0] == name}
    updates = [e for e in events if e["name"] == "update" and e["tid"] == training]
    steps = [
        (before["ts"] + before["dur"], after["ts"] + after["dur"])
        for before, after in pairwise(sorted(updates, key=lambda e: e["ts"]))
        # else the other model's turn lies between them
        if before["args"]["step"] % TURN != 1
    ]
    late = sorted(steps[len(steps) // 2 :], key=lambda step: step[1] - step[0])
    start, end = late[len(late) // 4]
    spans = [e for e in events if e["ph"] == "X" and e["tid"] in own]
    return Step(start, end, [s for s in spans if s["ts"] < end and s["ts"] + s["dur"] > start])


def kind_of(event: dict[str, Any]) -> str:
    name = event["name"]
    if "group" in event["args"]:
        return "" if name == "pack" else "message"
    return "wait" if name.startswith("wait") else "update" if name == "update" else "compute"


def bar(step: Step, kinds: tuple[str, ...], us_per_column: float) -> Text:
    """One row of a step: a character per part of it, in the colour of what happens there."""
    cells = [" "] * COLUMNS
    for kind in kinds:  # later ones lie above
        for span in (span for span in step.spans if kind_of(span) == kind):
            first = (span["ts"] - step.start) / us_per_column
            last = (span["ts"] + span["dur"] - step.start) / us_per_column
            for column in range(max(0, round(first)), min(COLUMNS, round(last))):
                cells[column] = kind
    line = Text()
    for cell in cells:
        line.append("█" if cell in KINDS else " ", style=KINDS.get(cell, ""))
    return line


def pictures(steps: list[Step]) -> Iterator[Text]:
    """A step of each, on one scale, and what the colours mean."""
    us_per_column = max(step.end - step.start for step in steps) / COLUMNS
    for name, step in zip(NAMES, steps, strict=True):
        yield Text(f"\n{name}: one step of rank 0, {step.length_ms:.0f} ms")
        yield Text("  training  ") + bar(step, ("compute", "update", "wait"), us_per_column)
        yield Text("  messages  ") + bar(step, ("message",), us_per_column)
    legend = Text("  ")
    for kind, colour in KINDS.items():
        legend.append("█", style=colour)
        legend.append(f" {kind}  ")
    yield legend


def figures(steps: list[Step], losses: list[list[float]], link: str) -> Table:
    """Both runs, side by side."""
    table = Table(title=f"GPT on the standard library, over a slow link ({link})")
    for heading in ("", *NAMES):
        table.add_column(heading)
    table.add_row("a quick iteration", *(f"{step.length_ms:.0f} ms" for step in steps))
    table.add_row("of it waiting", *(f"{step.waited_ms:.0f} ms" for step in steps))
    table.add_row("loss", *(f"{first:.3f} -> {last:.3f}" for first, last in losses))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, default=450, help="of the link, per second")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--emulated", action="store_true", help="make no real link")
    parser.add_argument(
        "--output", type=Path, default=Path("runs"), help="where the folder demo is made anew"
    )
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.output / FOLDER
    if options.rank:
        if options.emulated:
            emulate(options.mbit)
        # An emulated link returns a rank's own data: averages, but no shards.
        train(folder, options.steps, ["single", "oasr" if options.emulated else "hybrid"])
        return
    console = Console()
    refused = "" if options.emulated else why_no_link()
    emulated = options.emulated or bool(refused)
    if refused:
        console.print(f"No real link can be made here ({refused}): it is emulated, with one rank.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console.print(
        f"{options.steps} steps without overlap and {options.steps} with it, by turns ..."
    )
    start(options, emulated)
    events = load_timeline(folder / "timeline.rank0.json")["traceEvents"]
    steps = [quick_step(events, row) for row in ROWS]
    losses = json.loads((folder / "losses.txt").read_text())
    for line in pictures(steps):
        console.print(line)
    console.print(figures(steps, losses, "emulated" if emulated else "real"))
    page = [sys.executable, "-m", "wfbp", "report", str(folder)]
    subprocess.run(page, check=True, stdout=subprocess.DEVNULL)
    console.print(f"as a page: {folder / 'report.html'}")


if __name__ == "__main__":
    main()

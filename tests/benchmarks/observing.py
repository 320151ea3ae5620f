"""The cost of observing training: the timeline, and a line of statistics per step.

    mpirun -np 2 python -m tests.benchmarks observing

One distributed optimizer trains the MLP of the training benchmark by one plan. Three kinds of
blocks of steps alternate:

* plain steps
* steps with a timeline; its file is complete at the end of the block
* steps with ``optimizer.report()`` and a line at level info in each, written to a file

Each block is compared with the plain ones before and after it, by wall time and by CPU time of the
process. That includes the communication thread and the writer. The last column is the CPU time of
the added work alone. Use it if the machine is too noisy to show one percent.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import wfbp.horovod.torch as wfbp
from tests.benchmarks.models import mlp
from wfbp.cli.tables import print_table
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.planners import plan
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec
from wfbp.runtime.measuring import GroupTime, StepTimes
from wfbp.runtime.recorder import log_summary, summary
from wfbp.runtime.timeline_files import TraceWriter

BATCH, WIDTH = 64, 256
WATCHED = ("timeline", "report and info")
Times = tuple[float, float]
"""Wall and CPU seconds of a step."""


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks observing", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    wfbp.init()
    torch.manual_seed(0)
    model = mlp(width=WIDTH)
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6), model.named_parameters(), schedule="oasr"
    )
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(60):  # until the plan is installed
        step()
    with tempfile.TemporaryDirectory() as folder:
        rows, own = _measure(step, optimizer, Path(folder), arguments.rounds, arguments.steps)
    if wfbp.rank() == 0:
        _show(rows, own, optimizer.report()["phase"], arguments)
    wfbp.shutdown()


def _measure(
    step: Callable[[], None], optimizer: Any, folder: Path, rounds: int, steps: int
) -> tuple[dict[str, list[tuple[Times, Times]]], dict[str, float]]:
    """Per kind of watching, pairs of a plain block's step and a watched one's; and its own CPU
    seconds per step."""

    @contextmanager
    def timeline() -> Iterator[None]:
        wfbp.start_timeline(folder / "timeline.json")
        yield
        wfbp.stop_timeline()

    handler = logging.FileHandler(folder / f"log{wfbp.rank()}")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    summary.setLevel(logging.INFO)
    summary.propagate = False
    summary.addHandler(handler)

    def watched_step() -> None:
        step()
        start_s = time.thread_time()
        log_summary("MLP", optimizer.report())
        own.append(time.thread_time() - start_s)

    def block(body: Callable[[], None], around: AbstractContextManager[None]) -> Times:
        wfbp.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        with around:
            for _ in range(steps):
                body()
        return (time.perf_counter() - wall_s) / steps, (time.process_time() - cpu_s) / steps

    own: list[float] = []
    rows: dict[str, list[tuple[Times, Times]]] = {name: [] for name in WATCHED}
    before = block(step, nullcontext())
    for _ in range(rounds):
        for name in WATCHED:
            if name == "timeline":
                seen = block(step, timeline())
            else:
                seen = block(watched_step, nullcontext())
            behind = block(step, nullcontext())
            plain = (before[0] + behind[0]) / 2, (before[1] + behind[1]) / 2
            rows[name].append((plain, seen))
            before = behind
    return rows, {**_own_times(), "report and info": statistics.median(own)}


def _own_times() -> dict[str, float]:
    """CPU seconds per step of a timeline's writing alone, for the MLP's tensors in four groups."""
    layers = [(f"{2 * k}.{kind}", size) for k in range(60) for kind, size in _TENSORS]
    tensors = tuple(
        TraceTensor(TensorSpec(name, (size,), "float32"), 1e-4, 1e-4) for name, size in layers
    )
    made = plan(
        "threshold", Trace("MLP", tensors), Costs(LinearCost(1e-4, 1e-9)), threshold_bytes=4 << 20
    )
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        written = TraceWriter(Path(folder) / "timeline.json")
        for number in range(300):
            now_s = time.perf_counter()
            times = StepTimes(now_s, [now_s + 1e-4 * k for k in range(120)], [0.0] * 120)
            times.closed_s, times.done_s = now_s + 0.020, now_s + 0.022
            groups = range(len(made.groups))
            times.groups = [GroupTime(g, now_s + 0.01, now_s + 0.011, now_s + 0.02) for g in groups]
            start_s = time.thread_time()
            written.step("SGD", number, made, times)
            written.flush()
            took.append(time.thread_time() - start_s)
        written.close()
    return {"timeline": statistics.median(took)}


_TENSORS = (("weight", WIDTH * WIDTH), ("bias", WIDTH))


def _show(
    rows: dict[str, list[tuple[Times, Times]]],
    own: dict[str, float],
    phase: str,
    arguments: argparse.Namespace,
) -> None:
    table = []
    for name, pairs in rows.items():
        cells = {"<watching": name}
        for place, clock in enumerate(("wall", "CPU")):
            plain_s = statistics.median(plain[place] for plain, _ in pairs)
            added = [100 * (seen[place] / plain[place] - 1) for plain, seen in pairs]
            low, middle, high = statistics.quantiles(added, n=4)
            cells[f"{clock} ms"] = f"{plain_s * 1e3:.2f}"
            cells[f"{clock} added"] = f"{middle:+.2f}% ({low:+.2f} to {high:+.2f})"
        cells["its own CPU time"] = f"{own[name] * 1e6:.0f} us"
        table.append(cells)
    print_table(
        f"A step of the MLP, {wfbp.size()} ranks, plan {phase}; median and quartiles of "
        f"{arguments.rounds} blocks of {arguments.steps} steps",
        tuple(table[0]),
        [tuple(cells.values()) for cells in table],
    )

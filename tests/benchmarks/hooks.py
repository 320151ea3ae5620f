"""What announcing a gradient costs the training thread.

    mpirun -np 2 python -m tests.benchmarks hooks [--json]
    python -m tests.benchmarks hooks                  what the wrapper costs where there is one rank

Backward of a chain of small layers, bare and with a DistributedOptimizer's hooks, in turn; the
difference per tensor is the cost of one hook: in CPU time of the training thread, and in wall
time, which includes waiting for Python's interpreter lock while the communication thread has it.

One rank has no hooks and sends nothing: there, whole steps are compared, of the bare optimizer
and of the wrapped one, in an order that changes from step to step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import wfbp.torch as wfbp
from wfbp.cli.tables import print_table

WIDTH = 8
SCHEDULES = ("single", "threshold", "layerwise")
ALONE = {
    "300 tensors of 8 x 8": (150, 8, 1),
    "8 tensors of 256 x 256": (4, 256, 32),
    "8 tensors of 1024 x 1024": (4, 1024, 32),
}
"""Layers, their width, and the batch size."""


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks hooks", description=__doc__)
    parser.add_argument("--layers", type=int, default=150, help="layers, two tensors each")
    parser.add_argument("--steps", type=int, default=200, help="steps measured per contestant")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    wfbp.init()
    if wfbp.size() == 1:
        rows = [_alone(name, arguments.steps) for name in ALONE]
        title, headings = "A step on one rank", ("<model", "bare us", "wrapped us", "added %")
    else:
        rows = _per_hook(arguments.layers, arguments.steps)
        title = f"Cost of one hook, {2 * arguments.layers} tensors, {wfbp.size()} ranks"
        headings = ("<schedule", "CPU us", "wall us")
    if wfbp.rank() == 0 and arguments.json:
        print(json.dumps({"tensors": 2 * arguments.layers, "rows": rows}))
    elif wfbp.rank() == 0:
        cells = [[v if isinstance(v, str) else f"{v:.2f}" for v in row.values()] for row in rows]
        print_table(title, headings, cells)


def _chain(layers: int, width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


def _alone(name: str, steps: int) -> dict[str, Any]:
    """A step on one rank, in microseconds, and what the wrapper adds in percent."""
    layers, width, batch = ALONE[name]
    # One model for both: where parameters lie in memory makes more of a difference than wrapping.
    model = _chain(layers, width)
    inputs = torch.randn(batch, width)
    bare = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = wfbp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters()
    )

    def step(optimizer: torch.optim.Optimizer) -> float:
        start_s = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        return time.perf_counter() - start_s

    for optimizer in [bare, wrapped] * 10:
        step(optimizer)
    pairs = []
    for number in range(steps):
        took = {
            which: step(which) for which in ((bare, wrapped) if number % 2 else (wrapped, bare))
        }
        pairs.append((took[bare], took[wrapped]))
    bare_s, wrapped_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    # Of pairs: a machine that slows down for a while slows both of a pair.
    added_s = statistics.median(wrapped - bare for bare, wrapped in pairs)
    times = {"bare_us": bare_s * 1e6, "wrapped_us": wrapped_s * 1e6}
    return {"model": name, **times, "added_percent": 100 * added_s / bare_s}


def _per_hook(layers: int, steps: int) -> list[dict[str, Any]]:
    """Microseconds per hook by each schedule."""
    contestants = {name: _contestant(layers, name) for name in ("bare", *SCHEDULES)}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(steps):
        for name, step in contestants.items():
            seen[name].append(step())
    medians = {
        name: [statistics.median(column) for column in zip(*times, strict=True)]
        for name, times in seen.items()
    }
    scale = 1e6 / (2 * layers)
    cpu_s, wall_s = medians.pop("bare")
    return [
        {"schedule": name, "cpu_us": (cpu - cpu_s) * scale, "wall_us": (wall - wall_s) * scale}
        for name, (cpu, wall) in medians.items()
    ]


def _contestant(layers: int, schedule: str) -> Callable[[], tuple[float, float]]:
    """A function that runs one step and returns CPU and wall seconds of its backward."""
    model = _chain(layers, WIDTH)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if schedule != "bare":
        optimizer = wfbp.DistributedOptimizer(
            optimizer, model.named_parameters(), schedule=schedule
        )
    inputs = torch.randn(1, WIDTH)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        loss = model(inputs).sum()
        wfbp.barrier()
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        loss.backward()
        cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
        optimizer.step()
        return cpu_s, wall_s

    for _ in range(20):  # until the plan is installed
        step()
    return step

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
from typing import TypedDict

import torch

import wfbp.torch as wfbp
from wfbp.cli.tables import print_table

WIDTH = 8
SCHEDULES = ("single", "threshold", "layerwise")


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
        _alone(arguments.steps, arguments.json)
        return
    rows = _measure(arguments.layers, arguments.steps)
    if wfbp.rank() == 0:
        if arguments.json:
            print(json.dumps({"tensors": 2 * arguments.layers, "rows": rows}))
        else:
            print_table(
                f"Cost of one hook, {2 * arguments.layers} tensors, {wfbp.size()} ranks",
                ("<schedule", "CPU us", "wall us"),
                [(r["schedule"], f"{r['cpu_us']:.2f}", f"{r['wall_us']:.2f}") for r in rows],
            )


class AloneRow(TypedDict):
    """A step on one rank, in microseconds, and what the wrapper adds in percent."""

    model: str
    bare_us: float
    wrapped_us: float
    added_percent: float


ALONE = {
    "300 tensors of 8 x 8": (150, 8, 1),
    "8 tensors of 256 x 256": (4, 256, 32),
    "8 tensors of 1024 x 1024": (4, 1024, 32),
}
"""Layers, their width, and the batch size."""


def _alone(steps: int, as_json: bool) -> None:
    rows = [_compare(name, steps) for name in ALONE]
    if as_json:
        print(json.dumps({"rows": rows}))
        return
    print_table(
        "A step on one rank",
        ("<model", "bare us", "wrapped us", "added"),
        [
            (
                r["model"],
                f"{r['bare_us']:.1f}",
                f"{r['wrapped_us']:.1f}",
                f"{r['added_percent']:+.2f}%",
            )
            for r in rows
        ],
    )


def _compare(name: str, steps: int) -> AloneRow:
    layers, width, batch = ALONE[name]
    torch.manual_seed(0)
    # One model for both: where parameters lie in memory makes more of a difference than wrapping.
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    inputs = torch.randn(batch, width)
    bare = torch.optim.SGD(model.parameters(), lr=0.0)
    wrapped = wfbp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters()
    )
    contestants = [_whole_step(model, optimizer, inputs) for optimizer in (bare, wrapped)]
    pairs: list[list[float]] = []
    for number in range(steps):
        order = (0, 1) if number % 2 else (1, 0)
        took = {which: contestants[which]() for which in order}
        pairs.append([took[0], took[1]])
    bare_s, wrapped_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    # Of pairs: a machine that slows down for a while slows both of a pair.
    added_s = statistics.median(wrapped - bare for bare, wrapped in pairs)
    return {
        "model": name,
        "bare_us": bare_s * 1e6,
        "wrapped_us": wrapped_s * 1e6,
        "added_percent": 100 * added_s / bare_s,
    }


def _whole_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> Callable[[], float]:
    """A function that runs one step and returns its seconds."""

    def step() -> float:
        start_s = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        return time.perf_counter() - start_s

    for _ in range(10):
        step()
    return step


class Row(TypedDict):
    """Microseconds per hook by one schedule."""

    schedule: str
    cpu_us: float
    wall_us: float


def _measure(layers: int, steps: int) -> list[Row]:
    contestants = {"bare": _contestant(layers, None)}
    contestants |= {name: _contestant(layers, name) for name in SCHEDULES}
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(steps):
        for name, step in contestants.items():
            seen[name].append(step())
    medians = {
        name: [statistics.median(column) for column in zip(*times, strict=True)]
        for name, times in seen.items()
    }
    bare_cpu_s, bare_wall_s = medians["bare"]
    scale = 1e6 / (2 * layers)
    return [
        {
            "schedule": name,
            "cpu_us": (medians[name][0] - bare_cpu_s) * scale,
            "wall_us": (medians[name][1] - bare_wall_s) * scale,
        }
        for name in SCHEDULES
    ]


def _contestant(layers: int, schedule: str | None) -> Callable[[], tuple[float, float]]:
    """A function that runs one step and returns CPU and wall seconds of its backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if schedule is not None:
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

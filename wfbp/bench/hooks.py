"""What announcing a gradient costs the training thread.

    mpirun -np 2 python -m wfbp.bench hooks [--json]

Backward of a chain of small layers, bare and with a DistributedOptimizer's hooks, in turn; the
difference per tensor is the cost of one hook: in CPU time of the training thread, and in wall
time, which includes waiting for Python's interpreter lock while the communication thread has it.
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
from wfbp.bench.tables import print_table

WIDTH = 8
SCHEDULES = ("single", "threshold", "wfbp")


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m wfbp.bench hooks", description=__doc__)
    parser.add_argument("--layers", type=int, default=150, help="layers, two tensors each")
    parser.add_argument("--steps", type=int, default=200, help="steps measured per contestant")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    wfbp.init()
    if wfbp.size() == 1:
        parser.error("start it with mpirun -np 2: one rank has no hooks")
    rows = _measure(arguments.layers, arguments.steps)
    if wfbp.rank() == 0:
        if arguments.json:
            print(json.dumps({"tensors": 2 * arguments.layers, "rows": rows}))
        else:
            print_table(
                f"Cost of one hook, {2 * arguments.layers} tensors, {wfbp.size()} ranks",
                ("schedule", "CPU us", "wall us"),
                [(r["schedule"], f"{r['cpu_us']:.2f}", f"{r['wall_us']:.2f}") for r in rows],
            )


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

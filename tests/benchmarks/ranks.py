"""Many ranks on one machine: how long they take to start and to plan, and their memory.

    mpirun -np 32 python -m tests.benchmarks ranks
    python tools/link.py run --hosts 4 -np 32 -- python -m tests.benchmarks ranks

Trains a tiny model until its first plan is installed. Times are those of the slowest rank, memory
is that of the largest. ``start`` is ``wfbp.init()``, after all ranks have imported everything.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import wfbp.torch as wfbp
from wfbp.cli.tables import print_table
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.tuning import network

MIB = 2**20
MOST_STEPS = 400


def main(argv: Sequence[str]) -> int:
    """Train and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks ranks", description=__doc__)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--width", type=int, default=64, help="of three layers")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    MPI.COMM_WORLD.Barrier()  # all have imported everything
    mine = _train(arguments.schedule, arguments.width)
    everybody = wfbp.allgather_object(mine)
    if wfbp.rank() != 0:
        return 0
    found = {key: max(rank[key] for rank in everybody) for key in mine}
    found |= {"ranks": wfbp.size(), "schedule": arguments.schedule}
    print_table(
        f"{wfbp.size()} ranks, {mine['gradient_bytes'] / MIB:.2f} MiB of gradients",
        (
            "start s",
            "probe s",
            "first plan s",
            "steps",
            "exchanges",
            "KiB each",
            "step ms",
            "imports MiB",
            "end MiB",
            "own",
        ),
        [
            (
                f"{found['start_s']:.2f}",
                f"{found['probe_s']:.2f}",
                f"{found['plan_s']:.2f}",
                str(found["steps"]),
                str(found["exchanges"]),
                f"{found['exchanged_bytes'] / found['exchanges'] / 1024:.2f}",
                f"{found['step_s'] * 1e3:.1f}",
                *(f"{found[key] / MIB:.0f}" for key in ("imports_bytes", "end_bytes", "own_bytes")),
            )
        ],
    )
    print("exchanges: of control messages until the first plan, and the mean size of a message")
    print("imports, end: resident memory before init() and at the end; own: without shared pages")
    return 0


def _train(schedule: str, width: int) -> dict[str, Any]:
    """What this rank measured."""
    imports_bytes, _ = _memory()
    probes_s: list[float] = []
    measure = network.measure_cost

    def timed(*args: Any, **options: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return measure(*args, **options)
        finally:
            probes_s.append(time.perf_counter() - begin_s)

    network.measure_cost = timed
    exchanges, sizes = ControlChannel.exchange, list[int]()

    def counted(channel: ControlChannel, payload: bytes, *labels: str) -> list[bytes]:
        sizes.append(len(payload))
        return exchanges(channel, payload, *labels)

    ControlChannel.exchange = counted  # type: ignore[method-assign]
    begin_s = time.perf_counter()
    wfbp.init()
    start_s = time.perf_counter() - begin_s
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), schedule=schedule
    )
    data = torch.randn(4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    begin_s, steps = time.perf_counter(), 0
    while optimizer.report().get("phase") != "installed" and steps < MOST_STEPS:
        step()
        steps += 1
    plan_s = time.perf_counter() - begin_s
    until_plan = list(sizes)
    begin_s = time.perf_counter()
    for _ in range(10):
        step()
    step_s = (time.perf_counter() - begin_s) / 10
    end_bytes, own_bytes = _memory()
    return {
        "start_s": start_s,
        "probe_s": sum(probes_s),
        "plan_s": plan_s,
        "steps": steps,
        "exchanges": len(until_plan),
        "exchanged_bytes": sum(until_plan),
        "step_s": step_s,
        "imports_bytes": imports_bytes,
        "end_bytes": end_bytes,
        "own_bytes": own_bytes,
        "gradient_bytes": sum(p.nbytes for p in model.parameters()),
    }


def _memory() -> tuple[int, int]:
    """Resident memory, and what of it no other process shares, in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    kib = {key: int(value) for key, value in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    return kib["Rss"] * 1024, (kib["Private_Clean"] + kib["Private_Dirty"]) * 1024

"""Optimizer state and peak memory of a rank, with sharded updates and without.

    mpirun -np 4 python -m tests.benchmarks memory --update sharded
    mpirun -np 4 python -m tests.benchmarks memory --update baseline

Trains a chain of wide layers with Adam by one decoupled schedule, for some steps after its plan is
installed. Prints the figures of the rank that uses most: state, peak memory of the process, and
memory at the end. One update per process, because a peak cannot be forgotten. ``baseline``
trains by all-reduce, with whole state on every rank. Pages that ranks of one host have read of each
other's memory count on each of them; with ``WFBP_SHARED_MEMORY=0`` there are none.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import wfbp.torch as wfbp
from wfbp.cli.tables import print_table

UPDATES = ("sharded", "baseline")
MIB = 2**20


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks memory", description=__doc__)
    parser.add_argument("--update", choices=UPDATES, default="sharded")
    parser.add_argument("--schedule", default="independent", help="the decoupled schedule")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=5, help="steps under the installed plan")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    wfbp.init()
    mine = _train(arguments)
    ranks: list[dict[str, Any]] = wfbp.allgather_object(mine)
    if wfbp.rank() != 0:
        return
    keys = ("state_bytes", "peak_bytes", "end_bytes")
    found = {key: max(r[key] for r in ranks) for key in keys}
    found |= {"update": arguments.update, "ranks": wfbp.size(), "parameter_bytes": mine["params"]}
    if arguments.json:
        print(json.dumps(found))
        return
    print_table(
        f"Adam, {found['parameter_bytes'] / MIB:.0f} MiB of parameters, {wfbp.size()} ranks",
        ("<update", "state MiB", "peak MiB", "at the end", "before training"),
        [
            (
                arguments.update,
                f"{found['state_bytes'] / MIB:.1f}",
                f"{found['peak_bytes'] / MIB:.0f}",
                f"{found['end_bytes'] / MIB:.0f}",
                f"{mine['before_bytes'] / MIB:.0f}",
            )
        ],
    )


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Memory that this rank used, in bytes."""
    before_bytes = _peak_bytes()
    torch.manual_seed(0)
    width = arguments.width
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width) for _ in range(arguments.layers)), torch.nn.Linear(width, 1)
    )
    schedule = "threshold" if arguments.update == "baseline" else arguments.schedule
    optimizer = wfbp.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-4),
        model.named_parameters(),
        schedule=schedule,
    )
    data = torch.randn(4, width)
    left = arguments.steps
    while left:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        left -= optimizer.report().get("phase", "installed") == "installed"
    for _ in model.parameters():  # to read them is to wait for what still travels
        pass
    state = [v for entry in optimizer.state.values() for v in entry.values()]
    return {
        "state_bytes": sum(v.nbytes for v in state if isinstance(v, torch.Tensor)),
        "peak_bytes": _peak_bytes(),
        "end_bytes": _present_bytes(),
        "before_bytes": before_bytes,
        "params": sum(p.nbytes for p in model.parameters()),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _present_bytes() -> int:
    """What the process has in memory now; the peak where the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return _peak_bytes()
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

"""DDP, FSDP2 and single collectives by the backend wfbp of torch.distributed, against gloo.

    mpirun -np 2 python -m tests.benchmarks backend [--models mlp gpt fsdp2-gpt] [--sizes 4K 1M]
    python tools/link.py run --rate 1gbit -np 2 -- python -m tests.benchmarks backend

Both backends have a group in the same processes. Blocks of each take turns; a time is the slowest
rank's, a row the median over rounds. ``ratio`` is wfbp's median over gloo's. For collectives the
MPI library's blocking call is in the table, too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

from tests.benchmarks.models import MODELS, loss
from tests.benchmarks.turns import Step, in_turns
from wfbp.cli.tables import print_table
from wfbp.config import num_bytes
from wfbp.torch.distributed import register

BACKENDS = ("gloo", "wfbp")
SIZES = ["4K", "64K", "1M", "4M", "16M", "64M"]


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks backend", description=__doc__)
    parser.add_argument("--models", nargs="*", default=["mlp", "gpt", "fsdp2-gpt"])
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="of messages")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    register()
    torch.set_num_threads(1)
    dist.init_process_group("wfbp", timeout=timedelta(minutes=5))
    groups = {"wfbp": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows: list[tuple[str, dict[str, float], dict[str, float]]] = []
    for model in arguments.models:
        steps = {name: _trainer(model, groups[name]) for name in BACKENDS}
        rows.append((model, *_compare(steps, arguments.rounds)))
    for size in arguments.sizes:
        for name, calls in _collectives(num_bytes(size), groups).items():
            rows.append((f"{name} {size}", *_compare(calls, arguments.rounds)))
    if dist.get_rank() == 0:
        shown = [
            [
                title,
                *(
                    f"{1e3 * walls[name]:.3f}" if name in walls else ""
                    for name in (*BACKENDS, "mpi")
                ),
                f"{walls['wfbp'] / walls['gloo']:.2f}",
                f"{cpus['wfbp'] / cpus['gloo']:.2f}",
            ]
            for title, walls, cpus in rows
        ]
        title = f"{dist.get_world_size()} ranks, ms"
        print_table(title, ["<what", *BACKENDS, "MPI", "ratio", "CPU ratio"], shown)
    dist.destroy_process_group()


def _trainer(name: str, group: Any) -> Step:
    """A training iteration of a model under DDP, or under FSDP2."""
    bench = MODELS[name.removeprefix("fsdp2-")]
    torch.manual_seed(0)
    model: Any = bench.build()
    if name.startswith("fsdp2-"):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        blocks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        for block in [inner for each in blocks for inner in each] or list(model.children()):
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    batch = bench.batch(torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    return step


def _collectives(nbytes: int, groups: dict[str, Any]) -> dict[str, dict[str, Step]]:
    """Calls of each collective whose whole message has this size."""
    size, world = dist.get_world_size(), MPI.COMM_WORLD
    whole = torch.zeros(nbytes // 4 // size * size)
    part = torch.zeros(whole.numel() // size)
    array, piece = np.zeros(whole.numel(), np.float32), np.zeros(part.numel(), np.float32)
    mpi: dict[str, Step] = {
        "all_reduce": lambda: world.Allreduce(MPI.IN_PLACE, array),
        "all_gather": lambda: world.Allgather(piece, array),
        "reduce_scatter": lambda: world.Reduce_scatter_block(array, piece),
    }

    def calls(group: Any) -> dict[str, Step]:
        return {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        }

    found = {name: calls(groups[name]) for name in BACKENDS} | {"mpi": mpi}
    return {kind: {name: found[name][kind] for name in found} for kind in mpi}


def _compare(steps: dict[str, Step], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds, and CPU seconds of a rank, per call of each contestant."""
    walls, cpus = (
        {name: statistics.median(times) for name, times in found.items()}
        for found in in_turns(steps, rounds)
    )
    return walls, cpus

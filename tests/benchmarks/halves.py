"""Training with gradients in 16 bits: wfbp's compression against DDP's fp16 hook.

    mpirun -np 2 python -m tests.benchmarks halves --models mlp
    python tools/link.py run --rate 1gbit -np 2 -- python -m tests.benchmarks halves --models mlp

DDP refuses its bfloat16 hook on CPUs. Contestants take turns in one set of processes.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import wfbp.torch
import wfbp.torch.distributed
from tests.benchmarks.jobs import names
from tests.benchmarks.models import MODELS, loss
from tests.benchmarks.turns import Step, in_turns
from wfbp.cli.tables import print_table

NUM_BATCHES = 4
BUCKETS_MB = (1, 25, 100)
RATE = 1e-6


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks halves", description=__doc__)
    parser.add_argument("--models", type=names(MODELS), default=["mlp"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    wfbp.torch.init()
    torch.distributed.init_process_group("gloo", init_method="wfbp://")
    for model in options.models:
        ddp: dict[str, Step] = {f"ddp-{mb}-fp16": _ddp(model, mb) for mb in BUCKETS_MB}
        ours: dict[str, Any] = {name: _wfbp(model, name) for name in ("fp16", "bf16")}
        steps = ddp | {f"wfbp-auto-{name}": step for name, (step, _) in ours.items()}
        walls, cpus = in_turns(steps, options.rounds)
        medians = {name: statistics.median(times) for name, times in walls.items()}
        best_s = min(medians[name] for name in ddp)
        plans = {f"wfbp-auto-{name}": optimizer.report() for name, (_, optimizer) in ours.items()}
        rows = [
            [
                name,
                f"{seconds * 1e3:.1f}",
                f"{seconds / best_s:.3f}",
                f"{statistics.median(cpus[name]) * 1e3:.1f}",
                "{schedule}, {num_groups} groups".format(**plans[name]) if name in plans else "",
            ]
            for name, seconds in medians.items()
        ]
        if wfbp.torch.rank() == 0:
            headings = ("<contestant", "median ms", "of best DDP", "CPU ms", "<plan")
            print_table(f"{MODELS[model].title}, {wfbp.torch.size()} ranks", headings, rows)
    torch.distributed.destroy_process_group()
    wfbp.torch.shutdown()


def _ddp(model: str, bucket_mb: int) -> Step:
    torch.manual_seed(0)
    body = MODELS[model].build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # an option's name depends on the version
        module = nn.parallel.DistributedDataParallel(
            body, bucket_cap_mb=bucket_mb, broadcast_buffers=False
        )
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return _step(model, module, _sgd(body))


def _wfbp(model: str, half: str) -> tuple[Step, Any]:
    """A step after the plan is installed, and the optimizer."""
    torch.manual_seed(0)
    body = MODELS[model].build()
    compression = getattr(wfbp.torch.Compression, half)
    optimizer = wfbp.torch.DistributedOptimizer(
        _sgd(body), body.named_parameters(), compression=compression
    )
    step = _step(model, body, optimizer)
    while optimizer.report().get("phase") != "installed":
        step()
    return step, optimizer


def _sgd(body: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(body.parameters(), lr=RATE, momentum=0.9)


def _step(model: str, module: nn.Module, optimizer: Any) -> Step:
    generator = torch.Generator().manual_seed(wfbp.torch.rank())
    batches = cycle([MODELS[model].batch(generator) for _ in range(NUM_BATCHES)])

    def step() -> None:
        optimizer.zero_grad()
        loss(module, next(batches)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step

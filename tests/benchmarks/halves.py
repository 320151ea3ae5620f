"""Training with gradients in 16 bits: wfbp's compression against DDP's fp16 hook.

    mpirun -np 2 python -m tests.benchmarks halves --models mlp
    python tools/link.py run --rate 1gbit -np 2 -- python -m tests.benchmarks halves --models mlp

DDP refuses its bfloat16 hook on CPUs. Contestants take turns in one set of processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from unittest.mock import patch

import torch
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.benchmarks.jobs import names
from tests.benchmarks.models import MODELS
from tests.benchmarks.training import print_contestants
from wfbp.bench import training

CONTESTANTS = ("none", "ddp-1", "ddp-25", "ddp-100", "wfbp-auto")


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks halves", description=__doc__)
    parser.add_argument("--models", type=names(MODELS), default=["mlp"])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    of_fp16 = partial(_halved, training._ddp)
    for model in options.models:
        for half in ("fp16", "bf16"):
            with (
                patch.object(training, "_ddp", of_fp16),
                patch.object(training, "TOLERANCE", training.TOLERANCES[half]),
            ):
                found = training.run(MODELS[model], CONTESTANTS, options.rounds, "cpu", half)
            if MPI.COMM_WORLD.rank == 0:
                measured = {
                    "seconds": {c.name: c.seconds for c in found},
                    "cpu_seconds": {c.name: c.cpu_seconds for c in found},
                    "reports": {c.name: c.report for c in found if c.report},
                }
                job = {"ranks": MPI.COMM_WORLD.size, "compression": half}
                print_contestants(f"{MODELS[model].title}, DDP sends fp16", {**job, **measured})


def _halved(make: training.Any, model: nn.Module, mib: str) -> nn.Module:
    """DDP that sends 16 bits."""
    module: nn.parallel.DistributedDataParallel = make(model, mib)
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return module

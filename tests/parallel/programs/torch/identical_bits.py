"""Usage: mpirun -n N python identical_bits.py OUT

Trains under every schedule, and averages arrays of many sizes by each interface; writes the digests
of what comes out.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import wfbp.torch as hvd
from tests.parallel.programs.torch.bits import STEPS, differentiated, digest, reduced
from tests.support.cores import leave_cores
from tests.support.hosts import as_on_hosts, in_rows
from wfbp import allreduce
from wfbp.config import SCHEDULES, read_environment
from wfbp.core.planners import ALL_REDUCE_SCHEDULES

CONFIG = replace(
    read_environment()[0], warmup_steps=1, profile_steps=1, trial_steps=2, probe_budget_s=0.05
)
SIZES = (1, 2, 3, 17, 1021, 16_385, 300_001)
"""From one element to more than a chunk of shared memory."""


@functools.cache
def contributions(rank: int) -> list[Any]:
    return [np.random.default_rng((rank, n)).standard_normal(n).astype("f") for n in SIZES]


def trained(schedule: str, rank: int) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 300),
        torch.nn.ReLU(),
        torch.nn.Linear(300, 300),
        torch.nn.Linear(300, 7),
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), schedule=schedule)
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(3, 40, generator=data)).square().mean().backward()
        optimizer.step()
    return digest(model.parameters())


def main(out: str, layout: str) -> None:
    leave_cores()
    sizes = json.loads(layout)
    with as_on_hosts(lambda size: in_rows(sizes or [size])):
        hvd.init(config=CONFIG)
    rank = hvd.rank()

    def gradients(step: int) -> list[Any]:
        return contributions(rank)

    averages = {
        **{f"reducer, {name}": reduced(gradients, schedule=name) for name in ALL_REDUCE_SCHEDULES},
        **{f"jax, {n}": differentiated(gradients, schedule=n) for n in ("auto", "layerwise")},
    }
    averages["by name"] = digest(
        allreduce(array, name=str(array.size)) for array in contributions(rank)
    )
    results = {
        "parameters": {schedule: trained(schedule, rank) for schedule in SCHEDULES},
        "averages": averages,
    }
    Path(out, f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""Usage: mpirun -n N python identical_bits.py OUT

Trains under every schedule, and averages arrays of many sizes by each interface; writes the digests
of what comes out.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import wfbp.jax
import wfbp.torch as hvd
from tests.support.cores import leave_cores
from tests.support.hosts import as_on_hosts, in_rows
from wfbp import GradientReducer, allreduce
from wfbp.config import SCHEDULES, read_environment
from wfbp.core.planners import ALL_REDUCE_SCHEDULES

CONFIG = replace(
    read_environment()[0], warmup_steps=1, profile_steps=1, trial_steps=2, probe_budget_s=0.05
)
STEPS = 14
SIZES = (1, 2, 3, 17, 1021, 16_385, 300_001)
"""From one element to more than a chunk of shared memory."""


def digest(arrays: Iterable[Any]) -> str:
    return hashlib.sha256(b"".join(np.asarray(array).tobytes() for array in arrays)).hexdigest()


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
    return digest(p.detach() for p in model.parameters())


def reduced(schedule: str, rank: int) -> str:
    arrays = contributions(rank)
    named = [(str(array.size), array) for array in arrays]
    reducer = GradientReducer(named, schedule=schedule)
    for _ in range(STEPS):
        for number, array in reversed(list(enumerate(arrays))):
            reducer.mark_ready(number, array)
        averages = reducer.wait()
    return digest(averages)


def differentiated(schedule: str, rank: int) -> str:
    """The gradients of each array's product with ones are the array."""

    def loss(params: Any, arrays: Any) -> jax.Array:
        return sum(jnp.vdot(p, a) for p, a in zip(params, arrays, strict=True))  # type: ignore

    params = [jnp.ones(n) for n in SIZES]
    step = jax.jit(wfbp.jax.value_and_grad(loss, schedule=schedule))
    for _ in range(STEPS):
        _, averages = step(params, contributions(rank))
    return digest(averages)


def main(out: str, layout: str) -> None:
    leave_cores()
    sizes = json.loads(layout)
    with as_on_hosts(lambda size: in_rows(sizes or [size])):
        hvd.init(config=CONFIG)
    rank = hvd.rank()
    averages = {f"reducer, {name}": reduced(name, rank) for name in ALL_REDUCE_SCHEDULES}
    averages |= {f"jax, {name}": differentiated(name, rank) for name in ("auto", "layerwise")}
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

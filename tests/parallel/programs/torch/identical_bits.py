"""Usage: mpirun -n N python identical_bits.py OUT

Trains under every schedule and reduces arrays of many sizes; writes the digests of what comes out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

import wfbp.torch as hvd
from tests.support.hosts import as_on_hosts, in_rows
from wfbp import GradientReducer, allreduce
from wfbp.config import SCHEDULES
from wfbp.core.planners import ALL_REDUCE_SCHEDULES

STEPS = 14
SIZES = (1, 2, 3, 17, 1021, 16_385, 300_001)
"""From one element to more than a chunk of shared memory."""


def digest(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


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
    return digest([p.detach().numpy() for p in model.parameters()])


def reduced(schedule: str, rank: int) -> str:
    arrays = [np.random.default_rng((rank, n)).standard_normal(n).astype("f") for n in SIZES]
    reducer = GradientReducer([(str(n), a) for n, a in zip(SIZES, arrays, strict=True)], schedule)
    for _ in range(STEPS):
        for number, array in reversed(list(enumerate(arrays))):
            reducer.mark_ready(number, array)
        averages = reducer.wait()
    return digest([np.asarray(average) for average in averages])


def main(out: str, layout: str) -> None:
    sizes = json.loads(layout)
    with as_on_hosts(lambda size: in_rows(sizes or [size])):
        hvd.init()
    rank = hvd.rank()
    alone = [
        allreduce(np.random.default_rng((rank, n)).standard_normal(n).astype("f"), name=str(n))
        for n in SIZES
    ]
    results = {
        "trained": {schedule: trained(schedule, rank) for schedule in SCHEDULES},
        "reduced": {schedule: reduced(schedule, rank) for schedule in ALL_REDUCE_SCHEDULES},
        "by name": digest(alone),
    }
    Path(out, f"rank{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

"""Two ranks on one GPU train as one process on the whole batch: every schedule, by NCCL or staged.

Usage: mpirun -n 2 python tests/gpu/training_program.py OUT NCCL|STAGED; writes OUT/rank<r>.json,
differences by what was trained.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

SCHEDULES = ("auto", "oasr", "mgwfbp", "wfbp", "single", "threshold", "dear", "ipart")
SCHEDULES += ("independent", "hybrid", "ps", "ps_layerwise")
STEPS = 40
BATCH = 16


def network(normalised: bool) -> torch.nn.Sequential:
    first: list[torch.nn.Module] = [torch.nn.Linear(17, 33, bias=not normalised)]
    if normalised:
        first.append(torch.nn.BatchNorm1d(33))
    return torch.nn.Sequential(*first, torch.nn.Tanh(), torch.nn.Linear(33, 5)).cuda()


def batch(step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH * ranks, 17, generator=generator)
    return x.cuda(), x[:, :5].square().cuda()


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def difference(schedule: str, scaled: bool = False, normalised: bool = False) -> float:
    """The largest difference of a parameter from one process's, after some steps."""
    import wfbp.torch as wfbp

    rank, size = wfbp.rank(), wfbp.size()
    torch.manual_seed(3)
    reference = network(normalised)
    model = wfbp.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    optimizer = wfbp.DistributedOptimizer(
        optimizer, model.named_parameters(), schedule=schedule, threshold_bytes=500
    )
    scaler = torch.amp.GradScaler("cuda", enabled=scaled, init_scale=8.0)
    for step in range(STEPS):
        x, y = batch(step, size)
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        plain.step()
        optimizer.zero_grad()
        mine = slice(rank * BATCH, (rank + 1) * BATCH)
        scaler.scale(loss_of(model, x[mine], y[mine])).backward()
        scaler.step(optimizer)
        scaler.update()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in pairs)


def main() -> None:
    out, library = sys.argv[1:]
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    if library == "NCCL":  # or the ranks would be seen to share the GPU, and staged
        os.environ["NCCL_HOSTID"] = f"wfbp-test-{MPI.COMM_WORLD.rank}"
    torch.cuda.set_device(0)
    import wfbp.torch as wfbp
    from wfbp.config import Config

    quick = Config(
        warmup_steps=1, profile_steps=2, trial_steps=1, trial_min_s=0.0, probe_budget_s=0.1
    )
    wfbp.init(config=quick)
    found = {schedule: difference(schedule) for schedule in SCHEDULES}
    for schedule in ("wfbp", "dear"):
        found[f"{schedule}, scaled"] = difference(schedule, scaled=True)
        found[f"{schedule}, normalised"] = difference(schedule, normalised=True)
    Path(out, f"rank{wfbp.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

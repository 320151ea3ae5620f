"""Two ranks on one GPU train as one process on the whole batch: every schedule, by NCCL or staged.
Before that public operations give on the GPU what they give on the host, also among steps.

Usage: mpirun -n 2 python tests/gpu/training_program.py OUT NCCL|STAGED; writes OUT/rank<r>.json,
differences by what was done.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from wfbp.runtime import process

SCHEDULES = ("auto", "oasr", "mgwfbp", "layerwise", "single", "threshold", "dear", "ipart")
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


def public_operations(library: str) -> dict[str, float]:
    """Differences of operations on the GPU from the same ones on the host; and whether they went by
    NCCL exactly where they should (0 if so)."""
    import wfbp.torch as wfbp

    rank, size = wfbp.rank(), wfbp.size()
    values = 1 + (torch.arange(6000).reshape(3000, 2) + rank) % 3
    found: dict[str, float] = {}

    def compare(name: str, on_gpu: torch.Tensor, on_host: torch.Tensor) -> None:
        assert on_gpu.is_cuda, name
        found[name] = float((on_gpu.cpu().double() - on_host.double()).abs().max())

    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
    for dtype in dtypes:
        x = values.to(dtype)
        for op in (wfbp.Sum, wfbp.Average, wfbp.Min, wfbp.Max, wfbp.Product):
            name = f"{op} of {dtype}"
            compare(name, wfbp.allreduce(x.cuda(), op=op), wfbp.allreduce(x, op=op))
            shares = [wfbp.reducescatter(y[:2999], op=op) for y in (x.cuda(), x)]
            compare(f"{name}, shares", *shares)
        compare(f"{dtype}, root", wfbp.broadcast(x.cuda(), 1), wfbp.broadcast(x, 1))
        rows = [wfbp.allgather(y[: 7 * rank + 1]) for y in (x.cuda(), x)]
        compare(f"{dtype}, rows", *rows)
    empty = wfbp.allreduce(torch.empty(0, device="cuda"))
    assert empty.is_cuda
    assert not empty.numel()
    group = wfbp.grouped_allreduce([values.float().cuda()[:k] for k in (3, 0, 1000)])
    compare("group", torch.cat(group), wfbp.allreduce(values.float())[[*range(3), *range(1000)]])

    # What is made late on another stream, and used at once on the program's.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.ones(2048, 2048, device="cuda")
        for _ in range(50):
            late = late @ late / 2048
        handle = wfbp.allreduce_async(late * (rank + 1), op=wfbp.Sum)
    total = wfbp.synchronize(handle) + 0
    compare("late", total, torch.full((2048, 2048), size * (size + 1) / 2))
    torch.cuda.synchronize()
    handle = wfbp.allreduce_async(late)
    deadline = time.monotonic() + 60
    while not wfbp.poll(handle):
        assert time.monotonic() < deadline
    wfbp.synchronize(handle)

    torch.manual_seed(rank)
    model = network(normalised=True)
    torch.manual_seed(1)
    wanted = network(normalised=True)
    wfbp.broadcast_parameters(model.state_dict(), 1)
    for name, theirs in wanted.state_dict().items():
        compare(f"parameter {name}", model.state_dict()[name], theirs.cpu())

    devices: Any = process.operations("this test")
    by_nccl = devices._devices is not None and devices._devices._backend is not None
    found["by NCCL where it should be"] = float(by_nccl is not (library == "NCCL"))
    return found


def operations_among_steps() -> float:
    """The largest error of sums that are submitted in another order on each rank, among the steps
    of two optimizers whose gradients come in another order on each rank."""
    import wfbp.torch as wfbp

    rank, size = wfbp.rank(), wfbp.size()
    chance = random.Random(rank)
    models = [network(normalised=False) for _ in range(2)]
    optimizers: list[Any] = [
        wfbp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3),
            model.named_parameters(),
            schedule="layerwise",
        )
        for model in models
    ]
    worst = 0.0
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        handles = {}
        events: list[Any] = [*range(2), *(f"op {k}" for k in range(6))]
        chance.shuffle(events)
        for event in events:
            if isinstance(event, str):
                data = torch.full((1000 * int(event[3:]) + 1,), float(step + rank), device="cuda")
                handles[event] = wfbp.allreduce_async(data, name=event, op=wfbp.Sum)
            else:
                loss_of(models[event], *batch(step, 1)).backward()
        for optimizer in optimizers:
            optimizer.step()
        wanted = sum(step + r for r in range(size))
        for name in chance.sample(sorted(handles), len(handles)):
            worst = max(worst, float((wfbp.synchronize(handles[name]) - wanted).abs().max()))
    return worst


def main() -> None:
    out, library = sys.argv[1:]
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    if library == "NCCL":  # or the ranks would be seen to share the GPU, and staged
        os.environ["NCCL_HOSTID"] = f"wfbp-test-{MPI.COMM_WORLD.rank}"
    torch.cuda.set_device(0)
    import wfbp.torch as wfbp
    from wfbp.config import Config

    quick = Config(warmup_steps=1, profile_steps=2, trial_steps=1, probe_budget_s=0.1)
    wfbp.init(config=quick)
    found = public_operations(library)
    found["operations among steps"] = operations_among_steps()
    found |= {schedule: difference(schedule) for schedule in SCHEDULES}
    for schedule in ("layerwise", "dear"):
        found[f"{schedule}, scaled"] = difference(schedule, scaled=True)
        found[f"{schedule}, normalised"] = difference(schedule, normalised=True)
    Path(out, f"rank{wfbp.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Ranks on one GPU train with PyTorch as one process on the whole batch: every schedule, by NCCL or
staged. Before that public operations give on the GPU what they give on the host, also among steps.

Usage: mpirun -n 2 python -m tests.gpu.training_program ..., as in ``place.py``; writes
OUT/rank<r>.json, differences by what was done.
"""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import torch

import wfbp.torch as wfbp
from tests.gpu import place
from tests.support.software_device import SoftwareDevice
from wfbp.comm.device.links import OnDevice
from wfbp.torch import tensors

SCHEDULES = ("auto", "oasr", "mgwfbp", "layerwise", "single", "threshold", "dear", "ipart")
SCHEDULES += ("independent", "hybrid", "ps", "ps_layerwise")
STEPS = 24
BATCH = 16
DEVICE = "cuda"
"""The type of PyTorch's device; the CPU stands for a software device."""


def network(normalised: bool) -> torch.nn.Sequential:
    first: list[torch.nn.Module] = [torch.nn.Linear(17, 33, bias=not normalised)]
    if normalised:
        first.append(torch.nn.BatchNorm1d(33))
    return torch.nn.Sequential(*first, torch.nn.Tanh(), torch.nn.Linear(33, 5)).to(DEVICE)


def batch(step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH * ranks, 17, generator=generator)
    return x.to(DEVICE), x[:, :5].square().to(DEVICE)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def difference(schedule: str, scaled: bool = False, normalised: bool = False) -> float:
    """The largest difference of a parameter from one process's, after some steps."""
    rank, size = wfbp.rank(), wfbp.size()
    torch.manual_seed(3)
    reference = network(normalised)
    model = wfbp.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    optimizer = wfbp.DistributedOptimizer(
        optimizer, model.named_parameters(), schedule=schedule, threshold_bytes=500
    )
    scaler = torch.amp.GradScaler(DEVICE, enabled=scaled, init_scale=8.0)
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


def public_operations() -> dict[str, float]:
    """Differences of operations on the GPU from the same ones on the host."""
    rank, size = wfbp.rank(), wfbp.size()
    values = 1 + (torch.arange(6000).reshape(3000, 2) + rank) % 3
    found: dict[str, float] = {}

    def compare(name: str, on_gpu: torch.Tensor, on_host: torch.Tensor) -> None:
        assert on_gpu.device.type == DEVICE, name
        found[name] = float((on_gpu.cpu().double() - on_host.double()).abs().max())

    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
    for dtype in dtypes:
        x = values.to(dtype)
        for op in (wfbp.Sum, wfbp.Average, wfbp.Min, wfbp.Max, wfbp.Product):
            name = f"{op} of {dtype}"
            compare(name, wfbp.allreduce(x.to(DEVICE), op=op), wfbp.allreduce(x, op=op))
            shares = [wfbp.reducescatter(y[:2999], op=op) for y in (x.to(DEVICE), x)]
            compare(f"{name}, shares", *shares)
        compare(
            f"{dtype}, root", wfbp.broadcast(x.to(DEVICE), size - 1), wfbp.broadcast(x, size - 1)
        )
        rows = [wfbp.allgather(y[: 7 * rank + 1]) for y in (x.to(DEVICE), x)]
        compare(f"{dtype}, rows", *rows)
    empty = wfbp.allreduce(torch.empty(0, device=DEVICE))
    assert empty.device.type == DEVICE
    assert not empty.numel()
    group = wfbp.grouped_allreduce([values.float().to(DEVICE)[:k] for k in (3, 0, 1000)])
    compare("group", torch.cat(group), wfbp.allreduce(values.float())[[*range(3), *range(1000)]])

    if DEVICE == "cuda":
        compare("late", *late_on_another_stream())
    torch.manual_seed(rank)
    model = network(normalised=True)
    torch.manual_seed(size - 1)
    wanted = network(normalised=True)
    wfbp.broadcast_parameters(model.state_dict(), size - 1)
    for name, theirs in wanted.state_dict().items():
        compare(f"parameter {name}", model.state_dict()[name], theirs.cpu())
    return found


def late_on_another_stream() -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of data that is made late on another stream and used at once on the program's, and
    what it must be."""
    size = wfbp.size()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.ones(2048, 2048, device="cuda")
        for _ in range(50):
            late = late @ late / 2048
        handle = wfbp.allreduce_async(late * (wfbp.rank() + 1), op=wfbp.Sum)
    total = wfbp.synchronize(handle) + 0
    torch.cuda.synchronize()
    handle = wfbp.allreduce_async(late)
    deadline = time.monotonic() + 60
    while not wfbp.poll(handle):
        assert time.monotonic() < deadline
    wfbp.synchronize(handle)
    return total, torch.full((2048, 2048), size * (size + 1) / 2)


def operations_among_steps() -> float:
    """The largest error of sums that are submitted in another order on each rank, among the steps
    of two optimizers whose gradients come in another order on each rank."""
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
                data = torch.full((1000 * int(event[3:]) + 1,), float(step + rank), device=DEVICE)
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
    global DEVICE
    options = place.options(SCHEDULES)
    if options.software:
        DEVICE = "cpu"
        torch.set_num_threads(1)
        device = place.software_device(SoftwareDevice, options.library)
        tensors.location_of = lambda *_: OnDevice(device)  # type: ignore[assignment]
    else:
        torch.cuda.set_device(0)
    wfbp.init(config=place.CONFIG)
    found = public_operations()
    found["operations among steps"] = operations_among_steps()
    found |= {schedule: difference(schedule) for schedule in options.schedules}
    for schedule in ("layerwise", "dear"):
        found[f"{schedule}, scaled"] = difference(schedule, scaled=True)
        found[f"{schedule}, normalised"] = difference(schedule, normalised=True)
    place.conclude(options.out, options.library, found)


if __name__ == "__main__":
    main()

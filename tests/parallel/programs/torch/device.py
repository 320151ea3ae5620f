"""``equality.py`` with gradients on a software device: the whole runtime under real MPI.

PyTorch computes on the host, which plays the consumer's stream; what the lane does happens later,
on streams that are threads. Usage: mpirun -n N python device.py OUT RUN [RUN ...], where a run is
LIBRARY/SCHEDULE, and a library NCCL or STAGED; writes OUT/rank<r>.json, records by run.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import wfbp.horovod.torch as wfbp
from tests.parallel.programs.torch import equality
from tests.support.fake_nccl import FakeNccl
from tests.support.software_device import SoftwareDevice
from wfbp.comm import cost_probe
from wfbp.comm.device.links import OnDevice
from wfbp.comm.mpi.mpi_backend import MpiBackend
from wfbp.torch import tensors


def shared_state() -> None:
    """Parameters, buffers and optimizer state of every layout and type."""

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = [torch.nn.Conv2d(2, 3, 2), torch.nn.BatchNorm2d(3)]
        model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
        model.register_buffer("mask", torch.rand(4) > 0.5)
        model.register_buffer("waves", torch.randn(3, dtype=torch.complex64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
        model(torch.randn(2, 2, 4, 4)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    root = wfbp.size() - 1
    (wanted, of_root), (model, optimizer) = made(root), made(wfbp.rank())
    wfbp.broadcast_parameters(model.state_dict(), root)
    wfbp.broadcast_optimizer_state(optimizer, root)
    for mine, theirs in (
        (model.state_dict(), wanted.state_dict()),
        (optimizer.state_dict()["state"], of_root.state_dict()["state"]),
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert optimizer.param_groups[0]["lr"] == of_root.param_groups[0]["lr"]


def two_optimizers(device: SoftwareDevice) -> None:
    """Gradients of the one come first on one rank, those of the other on another; the ranks launch
    both in one order, and train as one process does."""
    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)) for _ in range(2)]
    references = copy.deepcopy(models)
    optimizers, plain = [], []
    for model, reference in zip(models, references, strict=True):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        named = model.named_parameters()
        optimizers.append(wfbp.DistributedOptimizer(sgd, named, schedule="layerwise"))
        plain.append(torch.optim.SGD(reference.parameters(), lr=0.1))

    def backward(model: torch.nn.Module, rank: int, step: int) -> None:
        data = torch.linspace(-1, 1, 20).reshape(4, 5) * (rank + 1) + step
        model(data).square().mean().backward()

    for step in range(5):
        for k in (0, 1) if wfbp.rank() == 0 else (1, 0):
            optimizers[k].zero_grad()
            backward(models[k], wfbp.rank(), step)
            time.sleep(5e-3)  # so that what may go has gone
        for k in (0, 1):
            optimizers[k].step()
            plain[k].zero_grad()
            for rank in range(wfbp.size()):
                backward(references[k], rank, step)
            for param in references[k].parameters():
                assert param.grad is not None
                param.grad /= wfbp.size()
            plain[k].step()
    for model, reference in zip(models, references, strict=True):
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other)
    streams = [call.stream for call in device.library.calls]
    orders = wfbp.allgather_object([sorted(set(streams)).index(stream) for stream in streams])
    assert all(order == orders[0] for order in orders), orders
    assert set(orders[0]) == {0, 1}


def records_of(library: str, schedules: list[str]) -> dict[str, Any]:
    """What training by each schedule gives on a fresh device, by run."""
    device = SoftwareDevice(seed=len(schedules), most_s=2e-4)
    if library == "NCCL":
        device.library = FakeNccl(device, MpiBackend)
    tensors.location_of = lambda *_: OnDevice(device)  # type: ignore[assignment]
    wfbp.init(config=equality.CONFIG)
    if device.library is not None:
        two_optimizers(device)
    shared_state()
    records = {f"{library}/{name}": equality.train(name, "adamw") for name in schedules}
    wfbp.shutdown()
    device.drain()
    assert device.calls["pack"] > 10 * len(schedules)  # a plan may have one message
    return records


def main() -> None:
    cost_probe.LONGEST_STREAM = 2
    torch.set_num_threads(1)
    out, *runs = sys.argv[1:]
    schedules: dict[str, list[str]] = {}
    for run in runs:
        library, schedule = run.split("/")
        schedules.setdefault(library, []).append(schedule)
    told: dict[str, Any] = {}
    for library, names in schedules.items():
        told |= records_of(library, names)
    Path(out, f"rank{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()

"""Checks of what PyTorch builds on process groups, with the backend ``wfbp``: DDP and others.

Each trains as one process does with the batches of all ranks.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.process_groups import group, grouped_in

check = Checks()
grouped = grouped_in(check)

STEPS = 3


class Model(nn.Module):
    """Two ways through it, one of which a step may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, data: torch.Tensor, both: bool = True) -> torch.Tensor:
        hidden = self.first(data).relu()
        result: torch.Tensor = self.second(hidden)
        return result + self.other(hidden) if both else result


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def reference(size: int, both: bool = True) -> list[torch.Tensor]:
    """Parameters after some steps on the batches of all ranks."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            (model(batch(rank, step), both).square().mean() / size).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(
    rank: int,
    wrap: Callable[[Model], nn.Module] = DistributedDataParallel,
    make: Callable[[Any], torch.optim.Optimizer] | None = None,
    both: bool = True,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = wrap(Model())
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step), both).square().mean().backward()
        optimizer.step()
    return model, optimizer


def close(model: nn.Module, wanted: list[torch.Tensor], atol: float = 1e-6) -> None:
    for found, value in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.detach(), value, atol=atol, rtol=1e-4)


@grouped
def ddp(rank: int, size: int) -> None:
    wanted = reference(size)
    variants: list[dict[str, Any]] = [
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ]
    for options in variants:
        close(train(rank, lambda m, o=options: DistributedDataParallel(m, **o))[0], wanted)
    unused = train(
        rank, lambda m: DistributedDataParallel(m, find_unused_parameters=True), both=False
    )
    close(unused[0], reference(size, both=False))
    torch.manual_seed(3)
    model = DistributedDataParallel(Model())
    with model.no_sync():
        model(batch(rank, 0)).sum().backward()
    model(batch(rank, 1)).sum().backward()
    gathered = [torch.empty_like(model.module.first.weight.grad) for _ in range(size)]
    dist.all_gather(gathered, model.module.first.weight.grad)
    assert all(each.equal(gathered[0]) for each in gathered)
    with model.join():  # ranks have different numbers of batches
        for step in range(rank + 1):
            model(batch(rank, step)).sum().backward()


@grouped
def ddp_compiled(rank: int, size: int) -> None:
    """Dynamo compiles what DDP does around the model, and comes to the group's methods."""

    class Buffered(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("known", torch.zeros(1))  # DDP broadcasts it in each forward

    def wrap(model: Model) -> nn.Module:
        own = Buffered()
        own.load_state_dict(model.state_dict(), strict=False)
        return torch.compile(DistributedDataParallel(own), backend="eager")  # type: ignore[return-value]

    model, _ = train(rank, wrap)
    close(model, reference(size))


@grouped
def ddp_communication_hooks(rank: int, size: int) -> None:
    wanted = reference(size)

    def hooked(state: Any, hook: Any) -> Callable[[Model], nn.Module]:
        def wrap(model: Model) -> nn.Module:
            wrapped = DistributedDataParallel(model)
            wrapped.register_comm_hook(state, hook)
            return wrapped

        return wrap

    close(train(rank, hooked(None, default_hooks.allreduce_hook))[0], wanted)
    close(train(rank, hooked(None, default_hooks.fp16_compress_hook))[0], wanted, atol=1e-2)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model, _ = train(rank, hooked(state, powerSGD_hook.powerSGD_hook))
    gathered = [torch.empty(8, 6) for _ in range(size)]
    dist.all_gather(gathered, model.module.first.weight.detach())
    assert all(each.equal(gathered[0]) for each in gathered)


@grouped
def fsdp2(rank: int, size: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    meshes = [init_device_mesh("cpu", (size,))]
    if size == 2:
        meshes.append(init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:

        def wrap(model: Model, mesh: Any = mesh) -> nn.Module:
            fully_shard(model.first, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        model, _ = train(rank, wrap)
        whole = [p.full_tensor() for p in model.parameters()]
        for found, value in zip(whole, reference(size), strict=True):
            torch.testing.assert_close(found, value, atol=1e-6, rtol=1e-4)
    import torch.distributed.checkpoint as checkpoints

    folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if rank == 0 else None)
    checkpoints.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    assert list(Path(folder).glob("*.distcp"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": get_model_state_dict(model)}
    checkpoints.load(state, checkpoint_id=folder)
    for parameter, value in zip(model.parameters(), whole, strict=True):
        assert parameter.full_tensor().equal(value)


@grouped
def fsdp1(rank: int, size: int) -> None:
    """It frees what was gathered by resizing the memory of the tensor."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def wrap(model: Model) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    model, _ = train(rank, wrap)
    with FullyShardedDataParallel.summon_full_params(model):
        close(model, reference(size))


@grouped
def zero_redundancy_optimizer(rank: int, size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(parameters: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            parameters, optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
        )

    model, optimizer = train(rank, make=make)
    close(model, reference(size))
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        assert optimizer.state_dict()["state"]


@grouped
def dtensor(rank: int, size: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    left, right = torch.arange(24.0).view(6, 4), torch.arange(20.0).view(4, 5)
    for first, second in (
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(1), Shard(0)),
    ):
        a = distribute_tensor(left, mesh, [first]).requires_grad_()
        b = distribute_tensor(right, mesh, [second])
        product = a @ b
        assert product.full_tensor().equal(left @ right)
        assert product.redistribute(mesh, [Shard(1)]).full_tensor().equal(left @ right)
        product.sum().backward()
        assert a.grad.full_tensor().equal((right.sum(1)).expand(6, 4))


@grouped
def tensor_parallel(rank: int, size: int) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 2 * size), nn.ReLU(), nn.Linear(2 * size, 3))
    plain = copy.deepcopy(model)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    found, wanted = model(batch(0, 0)), plain(batch(0, 0))
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)


@grouped
def pipelines(rank: int, size: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    torch.manual_seed(3)
    whole = nn.Sequential(*[nn.Linear(6, 6) for _ in range(size)])
    given = torch.cat([batch(0, step) for step in range(size)])
    target = torch.ones_like(given)
    for schedule in (ScheduleGPipe, Schedule1F1B):
        part = copy.deepcopy(whole[rank])
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        runs = schedule(stage, n_microbatches=size, loss_fn=nn.functional.mse_loss)
        runs.step(*[given][: rank == 0], target=target if rank == size - 1 else None)
        whole.zero_grad()
        nn.functional.mse_loss(whole(given), target).backward()
        for parameter, other in zip(part.parameters(), whole[rank].parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


@grouped
def collectives_in_backward(rank: int, size: int) -> None:
    from torch.distributed.nn import functional

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # other functions are recommended now
        mine = torch.full((size, 2), float(rank + 1), requires_grad=True)
        functional.all_reduce(mine).mul(rank + 2).sum().backward()
        everyone = sum(r + 2.0 for r in range(size))
        assert mine.grad.unique().tolist() == [everyone]
        mine.grad = None
        torch.cat(functional.all_gather(mine)).mul(rank + 2).sum().backward()
        assert mine.grad.unique().tolist() == [everyone]
        mine.grad = None
        arrived = functional.all_to_all_single(torch.empty(size, 2), mine)
        assert arrived[:, 0].tolist() == [r + 1.0 for r in range(size)]
        arrived.mul(rank + 2).sum().backward()
        assert mine.grad[:, 0].tolist() == [r + 2.0 for r in range(size)]


@grouped
def results_of_functional_collectives(rank: int, size: int) -> None:
    """Other collectives wait for them."""
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD
    total = float(sum(range(1, size + 1)))
    pending = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", group)
    dist.all_reduce(pending)
    assert pending.tolist() == [size * total] * 3
    pending = functional.all_reduce(torch.full((3,), rank + 1.0), "sum", group)
    everyone = torch.empty(3 * size)
    dist.all_gather_single(everyone, pending)
    assert everyone.unique().tolist() == [total]


@grouped
def beside_a_distributed_optimizer(rank: int, size: int) -> None:
    """One model by DDP, another by wfbp's optimizer, in turns."""
    torch.manual_seed(3)
    ours, theirs = Model(), DistributedDataParallel(Model())
    theirs.module.load_state_dict(ours.state_dict())
    optimizers = [
        wfbp.torch.DistributedOptimizer(
            torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9),
            named_parameters=ours.named_parameters(),
        ),
        torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9),
    ]
    wanted = copy.deepcopy(ours)
    sgd = torch.optim.SGD(wanted.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        sgd.zero_grad()
        for r in range(size):
            (wanted(batch(r, step)).square().mean() / size).backward()
        sgd.step()
    close(ours, [p.detach() for p in wanted.parameters()])
    close(theirs, [p.detach() for p in wanted.parameters()])


@check
def ddp_of_models_that_differ() -> None:
    """PyTorch's C++ code passes the text on, within an error of its own."""
    with group() as (rank, size):
        model = DistributedDataParallel(Model())
        if rank == size - 1:
            dist.barrier(async_op=True)
        with pytest.raises(RuntimeError, match=r"DisagreementError.*ranks called different op"):
            model(batch(rank, 0)).sum().backward()

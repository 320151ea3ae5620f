"""Collectives on tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.collective_values import TORCH_DTYPES
from tests.parallel.programs.torch.training import adamw, data, mlp, same

check = Checks()


@check
def allreduce_of_gradients_that_lie_apart() -> None:
    """In place, of a gradient that is still where it was reduced, on rank 0 alone."""
    rank, size = wfbp.rank(), wfbp.size()
    model = nn.Linear(400, 200)
    optimizer = wfbp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 400)).sum().backward()
        optimizer.step()
        gradient = model.weight.grad
        assert gradient is not None
        mine = gradient.detach() if rank == 0 else gradient.detach().clone()
        wfbp.torch.allreduce_(mine, op=wfbp.Sum)
        same(mine, torch.full((200, 400), 3.0 * size), "in place")


@check
def allgather_of_uneven_tensors() -> None:
    rank, size = wfbp.rank(), wfbp.size()
    for dtype in TORCH_DTYPES:
        for tail in ((), (3,), (2, 0)):
            found = wfbp.torch.allgather(torch.full((2 * rank, *tail), rank, dtype=dtype))
            wanted = torch.cat([torch.full((2 * r, *tail), r, dtype=dtype) for r in range(size)])
            same(found, wanted, f"{dtype} {tail}")
    raises(ValueError, "scalar", act=lambda: wfbp.torch.allgather(torch.tensor(1.0)))


@check
def broadcast_of_parameters() -> None:
    torch.manual_seed(100 + wfbp.rank())
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.LazyLinear(2), nn.Embedding(3, 2)
    )
    model[:4](torch.randn(2, 3, 4, 4))
    model = model.to(memory_format=torch.channels_last)
    model[4].to(torch.bfloat16)
    model.register_buffer("flags", torch.tensor([True, wfbp.rank() == 0]))
    model[1].num_batches_tracked += wfbp.rank()
    root = wfbp.size() - 1
    wanted = wfbp.broadcast_object(copy.deepcopy(model.state_dict()), root)
    wfbp.torch.broadcast_parameters(model.state_dict(), root_rank=root)
    for name, tensor in model.state_dict().items():
        same(tensor, wanted[name], name)
    wfbp.broadcast_parameters(model.named_parameters(), root_rank=0)
    states = wfbp.allgather_object([p.detach() for p in model.parameters()])
    for theirs in states:
        for p, q in zip(states[0], theirs, strict=True):
            same(q, p, "parameter")


@check
def broadcast_of_optimizer_state() -> None:
    """A fresh rank gets Adam's state and goes on as the others do."""
    torch.manual_seed(4)
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    if wfbp.rank() == 0:  # as if resumed from a checkpoint that only rank 0 has read
        for step in range(3):
            plain = copy.deepcopy(model)
            inner = adamw(plain.parameters())
            inner.load_state_dict(optimizer.state_dict())
            plain(data(step, 0, 4, 5)).square().mean().backward()
            inner.step()
            model.load_state_dict(plain.state_dict())
            optimizer.load_state_dict(inner.state_dict())
        optimizer.param_groups[0]["lr"] = 0.123
    wfbp.torch.broadcast_parameters(model.state_dict(), root_rank=0)
    wfbp.torch.broadcast_optimizer_state(optimizer, root_rank=0)
    states = wfbp.allgather_object(optimizer.state_dict())
    for theirs in states:
        assert theirs["param_groups"] == states[0]["param_groups"]
        assert theirs["param_groups"][0]["lr"] == 0.123
        assert theirs["state"].keys() == states[0]["state"].keys() == set(range(4))
        for k, state in states[0]["state"].items():
            for key, value in state.items():
                same(theirs["state"][k][key], value, f"{k} {key}")
    for step in range(3):
        optimizer.zero_grad()
        model(data(step, wfbp.rank(), 4, 5)).square().mean().backward()
        optimizer.step()
    everybody = wfbp.allgather_object([p.detach() for p in model.parameters()])
    for theirs in everybody:
        for p, q in zip(everybody[0], theirs, strict=True):
            same(q, p, "parameter")


@check
def broadcast_of_lbfgs_state_and_of_none() -> None:
    model = mlp(5, 7, 3)
    for optimizer in (
        torch.optim.LBFGS(model.parameters(), max_iter=3),
        torch.optim.SGD(model.parameters(), lr=0.1 * (1 + wfbp.rank()), momentum=0.9),
    ):
        if wfbp.rank() == 0:

            def evaluate(optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(data(0, 0, 4, 5)).square().mean()
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(evaluate)
        wfbp.broadcast_optimizer_state(optimizer, root_rank=0)
        for theirs in wfbp.allgather_object(optimizer.state_dict()):
            assert repr(theirs) == repr(optimizer.state_dict())

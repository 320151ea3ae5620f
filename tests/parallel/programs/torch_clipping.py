"""What happens between backward and step."""

from __future__ import annotations

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.training import (
    adamw,
    averaged,
    check_training,
    compare,
    data,
    mlp,
    momentum,
    same,
    square,
)

check = Checks()


@check
def clipping() -> None:
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    plain = adamw(reference.parameters())
    for step in range(12):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with optimizer.skip_synchronize():
            optimizer.step()
        averaged(reference, square, step, wfbp.size())
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
        plain.step()
        same(norm, wanted, "norm", 1e-12)
        compare(model, reference, f"step {step}", 1e-12)


@check
def clipping_before_averaging_is_an_error() -> None:
    for unused_first in (False, True):
        model = nn.ModuleList([nn.Linear(2, 2).double(), mlp(5, 7, 3)])
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
        square(model[1], wfbp.rank(), 0)
        if not unused_first:
            model[0](data(0, 0, 2)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        raises(
            RuntimeError,
            "changed in place",
            "optimizer.synchronize()",
            "skip_synchronize",
            act=optimizer.step,
        )


@check
def skip_synchronize_needs_synchronize() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    square(model, wfbp.rank(), 0)

    def act() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()

    raises(RuntimeError, "synchronize()", act=act)
    optimizer.step()


@check
def synchronize_then_step() -> None:
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    plain = adamw(reference.parameters())
    for step in range(6):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.synchronize()
        optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
        compare(model, reference, f"step {step}", 1e-12)


@check
def named_operations_between_hooks_and_step() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        square(model, rank, step)

    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        mean = wfbp.allreduce(torch.tensor([float(wfbp.rank())]), name="loss")
        assert mean.item() == (wfbp.size() - 1) / 2

    check_training(mlp(5, 7, 3), backward, momentum, zero=zero)
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(5):
        optimizer.zero_grad()
        loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
        loss.backward()
        wfbp.allreduce(loss.detach(), name="loss")
        wfbp.barrier()
        optimizer.step()

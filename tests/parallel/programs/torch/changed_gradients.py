"""Gradients that the program changes, replaces or drops before they are averaged, and after."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    data,
    mlp,
    momentum,
    same,
    square,
    twins,
)
from wfbp.errors import DisagreementError
from wfbp.runtime import process

check = Checks()


@check
def replacing_or_changing_any_gradient_is_an_error() -> None:
    for chosen, told in itertools.product(range(6), ("replaced", "changed in place")):
        model = mlp(5, 7, 7, 3)
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            square(model, wfbp.rank(), step)
            if step < 3:
                optimizer.step()
        param = list(model.parameters())[chosen]
        assert param.grad is not None
        if told == "replaced":
            param.grad = torch.clamp(param.grad, -1e-3, 1e-3)
        else:
            param.grad.mul_(0.5)
        raises(RuntimeError, told, "optimizer.synchronize()", act=optimizer.step)
        optimizer.zero_grad()
        square(model, wfbp.rank(), 0)
        optimizer.step()


@check
def gradient_in_other_memory() -> None:
    both = twins(partial(torch.optim.SGD, lr=0.0))
    model, optimizer = both[:2]
    for step in range(8):
        optimizer.zero_grad()
        (model[2](data(0, 0, 4, 7)).sum() * 10.0**step).backward()
        optimizer.synchronize()
        grad = model[2].bias.grad
        assert grad is not None
        same(grad, torch.full_like(grad, 4 * 10.0**step), f"step {step}", 1e-12)
        if step in (0, 4):
            grad.data = grad.data.clamp(-0.5, 0.5)
            assert model[2].bias.grad is grad
        both.step_synchronized()


class Picture(nn.Module):
    """A network whose weights have a memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Conv2d(3, 4, 3)
        self.out = nn.Linear(4, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(torch.tanh(self.weights(x)).mean((2, 3)))
        return y


def pictures(model: nn.Module, rank: int, step: int) -> None:
    model(data(step, rank, 2, 3, 5, 5)).square().mean().backward()


@check
def memory_order_changed_after_wrapping() -> None:
    """All-reduces go on; where shards are exchanged it is an error, on every rank."""
    # PyTorch finds gradients slow that lie otherwise than their parameter.
    warnings.filterwarnings("ignore", "grad and param do not obey")
    for with_gradients, only in ((False, None), (True, None), (False, 1)):
        torch.manual_seed(3)
        both = twins(model=Picture(), schedule="mgwfbp")
        for step in range(8):
            both.optimizer.zero_grad(set_to_none=not with_gradients)
            if step == 3 and only in (None, wfbp.rank()):
                both.model.to(memory_format=torch.channels_last)
            pictures(both.model, wfbp.rank(), step)
            both.optimizer.synchronize()
            both.step_synchronized()
            both.follow(step, pictures)
            both.compare(f"step {step}")
    if process.current("here").config.warmup_steps > 1:
        return  # it never comes to shards
    model = Picture()
    optimizer = wfbp.torch.DistributedOptimizer(
        momentum(model.parameters()), schedule="ps_layerwise"
    )

    def act() -> None:
        for step in range(12):
            optimizer.zero_grad()
            pictures(model, wfbp.rank(), step)
            optimizer.step()
            if step == 5:
                optimizer.synchronize()
                model.to(memory_format=torch.channels_last)

    raises(RuntimeError, "strides", "before DistributedOptimizer", act=act)


@check
def memory_order_differs_between_ranks() -> None:
    model = Picture()
    if wfbp.rank() == 1:
        model.to(memory_format=torch.channels_last)
    raises(
        DisagreementError,
        "the memory order of weights.weight (rank",
        "rank 1: (0, 2, 3, 1))",
        act=lambda: wfbp.torch.DistributedOptimizer(
            momentum(model.parameters()), model.named_parameters()
        ),
    )


@check
def data_of_another_size() -> None:
    for size in (4, 200_000):
        long, short = nn.Parameter(torch.ones(100_000)), nn.Parameter(torch.ones(3))
        optimizer = wfbp.torch.DistributedOptimizer(torch.optim.SGD([long, short], lr=0.1))
        for _ in range(4):
            optimizer.zero_grad()
            (long.sum() + short.sum()).backward()
            optimizer.step()
        optimizer.synchronize()
        optimizer.zero_grad()
        long.data = torch.ones(size)

        def act(long: torch.Tensor = long, short: torch.Tensor = short) -> None:
            (long.sum() + short.sum()).backward()
            optimizer.step()  # noqa: B023 - called in the same turn

        raises(RuntimeError, "(100000,)", f"({size},)", act=act)

"""Gradients that the program changes, replaces or drops before they are averaged, and after."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    Branches,
    data,
    due,
    mlp,
    momentum,
    same,
    square,
    twins,
)
from wfbp.errors import DisagreementError
from wfbp.runtime import process

check = Checks()


def trained(steps: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model some steps into its training, with gradients of its own on every rank."""
    model = mlp(5, 7, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        square(model, wfbp.rank(), step)
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    square(model, wfbp.rank(), steps)
    return model, optimizer


@check
def replacing_a_gradient_is_an_error() -> None:
    for chosen in range(6):
        model, optimizer = trained(3)
        param = list(model.parameters())[chosen]
        assert param.grad is not None
        param.grad = torch.clamp(param.grad, -1e-3, 1e-3)
        raises(RuntimeError, "replaced", "optimizer.synchronize()", act=optimizer.step)
        optimizer.zero_grad()
        square(model, wfbp.rank(), 0)
        optimizer.step()


@check
def changing_any_gradient_is_an_error() -> None:
    for chosen in range(6):
        model, optimizer = trained(3)
        param = list(model.parameters())[chosen]
        assert param.grad is not None
        param.grad.mul_(0.5)
        raises(RuntimeError, "changed in place", act=optimizer.step)


@check
def unscaling_gradients_in_their_buffers_is_an_error() -> None:
    for steps in (0, 5):
        model, optimizer = trained(steps)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        raises(RuntimeError, "changed in place", act=optimizer.step)
        del model


class Words(nn.Module):
    """Token 0 is in no batch: most of the first gradient is zero, also its first bytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.out = nn.Embedding(300, 8).double(), nn.Linear(8, 300).double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(self.inner(tokens))
        return y


def words(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.tensor([3 + rank, 200 + step % 7])).square().mean()
    return loss


@check
def gradients_changed_where_pytorch_counts_nothing() -> None:
    """Whatever of them has been sent by then; reading them is nobody's harm."""

    def unscale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler.unscale_(optimizer)

    def scale(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            p.grad.data.mul_(1 / 1024)  # type: ignore[union-attr]

    def clamp(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            p.grad.data.clamp_(-1e-4, 1e-4)  # type: ignore[union-attr]

    def clamp_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        # Most schedules send it first.
        model.out.weight.grad.data.clamp_(-1e-4, 1e-4)  # type: ignore[union-attr]

    def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            assert p.grad is not None
            assert p.grad.norm() >= 0
            assert p.grad.data.abs().max() >= 0
            assert p.grad.numpy().shape == p.shape

    for change in (unscale, scale, clamp, clamp_one, look):
        both = twins(model=Words())
        model, optimizer = both[:2]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(7):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            scaler.scale(words(model, wfbp.rank(), step)).backward()
            if change is look:
                look(model, optimizer)
            elif step in (0, 4):
                change(model, optimizer)
                step_it = optimizer.step
                if change is unscale and step:
                    step_it = lambda: scaler.step(optimizer)  # noqa: E731,B023
                raises(RuntimeError, "gradient of", "changed in place", act=step_it)
                if change is unscale:
                    scaler.update()
                optimizer.zero_grad()
                scaler.scale(words(model, wfbp.rank(), step)).backward()
            scaler.step(optimizer)
            scaler.update()
            both.follow(step, lambda m, r, s: words(m, r, s).backward())
        both.equal(change.__name__, 1e-12)


def lies_in_buffer(model: Branches, optimizer: Any, branch: int) -> bool:
    """Whether a branch's gradient is memory of the plan in use."""
    grad = model.branches[branch].weight.grad
    return grad is not None and grad.data_ptr() in optimizer._wfbp_sync.reducer._owner_of


@check
def one_gradient_for_two_parameters() -> None:
    """An error on every rank where the gradient is in the buffer of the other's average, as it is
    unless plans have changed or ranks update shards; right elsewhere."""
    kept = process.current("check").config.warmup_steps > 1  # one plan all the time
    for one, other in ((0, 1), (1, 0)):
        both = twins(model=Branches())
        model, optimizer = both[:2]

        def chosen(net: nn.Module, rank: int, step: int, only: int = other) -> None:
            net(data(step, rank, 4, 5), [0, 1, 2] if step < 6 else [2, only]).backward()

        for step in range(10):
            optimizer.zero_grad(set_to_none=False)
            both.backward(step, chosen)
            for net in both.nets if step >= 6 else ():
                net.branches[one].weight.grad = net.branches[other].weight.grad
                net.branches[one].bias.grad = None
            in_buffer = step >= 6 and lies_in_buffer(model, optimizer, other)
            assert in_buffer or not (kept and step == 6)
            if in_buffer:
                wanted = "give each tensor its own gradient"
                raises(RuntimeError, wanted, act=optimizer.step)
                break
            both.update()
            both.compare(f"step {step}")


def dropping(zero_all: bool, first: bool, last: bool) -> None:
    """Between two backward passes the program forgets gradients without the optimizer's help."""
    both = twins(model=mlp(5, 7, 7, 3))
    model, optimizer = both[:2]

    def kept(net: nn.Module, rank: int, step: int) -> None:
        if (first and rank == 0) or (last and rank > 0):
            net[-1](data(step, rank, 4, 7)).square().mean().backward()  # type: ignore[index]

    for step in range(10):
        optimizer.zero_grad()
        if zero_all or wfbp.rank() == 0:
            (1e3 * model(data(step, wfbp.rank(), 4, 5))).sum().backward()
            model.zero_grad()
        kept(model, wfbp.rank(), step)
        optimizer.step()
        both.follow(step, kept)
        if due(step, 10):
            both.compare(f"step {step}")


@check
def a_batch_skipped_on_all_ranks() -> None:
    dropping(zero_all=True, first=True, last=True)
    dropping(zero_all=True, first=True, last=False)


@check
def a_batch_skipped_on_one_rank() -> None:
    dropping(zero_all=False, first=True, last=True)
    dropping(zero_all=False, first=False, last=True)


@check
def nothing_left_of_a_skipped_batch() -> None:
    dropping(zero_all=True, first=False, last=False)


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

"""How programs forget gradients, in every form, at every moment."""

from __future__ import annotations

import weakref

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    adamw,
    averaged,
    check_training,
    compare,
    data,
    due,
    mlp,
    momentum,
    pair,
    square,
    step_both,
)

check = Checks()


@check
def zero_grad_to_none() -> None:
    check_training(mlp(5, 7, 3), square, momentum)


@check
def zero_grad_to_zeros() -> None:
    check_training(
        mlp(5, 7, 3), square, momentum, zero=lambda m, opt: opt.zero_grad(set_to_none=False)
    )


@check
def zero_grad_of_the_model() -> None:
    check_training(mlp(5, 7, 3), square, adamw, zero=lambda m, opt: m.zero_grad())


@check
def zero_grad_of_the_model_to_zeros() -> None:
    check_training(mlp(5, 7, 3), square, adamw, zero=lambda m, opt: m.zero_grad(set_to_none=False))


@check
def zero_grad_discards_what_was_computed() -> None:
    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (1e3 * model(data(0, wfbp.rank(), 4, 5))).sum().backward()
        optimizer.zero_grad()

    check_training(mlp(5, 7, 3), square, momentum, zero=zero)


@check
def zero_grad_discards_a_part() -> None:
    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (1e3 * model[-1](data(0, wfbp.rank(), 4, 7))).sum().backward()  # type: ignore[index]
        optimizer.zero_grad()

    check_training(mlp(5, 7, 3), square, momentum, zero=zero)


@check
def zero_grad_discards_what_some_ranks_computed() -> None:
    for who in (0, 1):

        def zero(model: nn.Module, optimizer: torch.optim.Optimizer, who: int = who) -> None:
            if wfbp.rank() == who:
                (1e3 * model(data(0, who, 4, 5))).sum().backward()
            optimizer.zero_grad()

        check_training(mlp(5, 7, 3), square, momentum, zero=zero)


@check
def gradients_kept_from_step_to_step() -> None:
    model = mlp(5, 7, 3)
    reference = mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    plain = momentum(reference.parameters())
    for step in range(6):
        square(model, wfbp.rank(), step)
        optimizer.step()
        for rank in range(wfbp.size()):
            (reference(data(step, rank, 4, 5)).square().mean() / wfbp.size()).backward()
        plain.step()
        if due(step, 6):
            compare(model, reference, f"step {step}", 1e-12)


@check
def gradients_that_were_discarded_are_let_go() -> None:
    """Passes between steps that nobody steps on, as for saliency maps, on one rank only."""
    for to_none in (True, False):
        model, reference = pair()
        optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
        plain = momentum(reference.parameters())
        params = list(model.parameters())
        for step in range(6):
            alive: list[weakref.ref[torch.Tensor]] = []
            optimizer.zero_grad(set_to_none=to_none)
            for _ in range(20 if wfbp.rank() == step % 2 else 0):
                (1e3 * model(data(step, 0, 4, 5))).sum().backward()
                found = [p.grad for p in params if p.grad is not None]
                assert len(found) == len(params)
                alive += map(weakref.ref, found)
                del found
                optimizer.zero_grad(set_to_none=to_none)
            assert len({id(grad()) for grad in alive} - {id(None)}) <= 2 * len(params)
            step_both(model, optimizer, reference, plain, step)
        compare(model, reference, f"to_none={to_none}", 1e-12)


@check
def gradients_stay_the_same_tensors() -> None:
    """Where they are zeroed in place, a program may keep a list of them."""
    model, reference = pair()
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()), schedule="layerwise")
    plain = momentum(reference.parameters())
    held: list[torch.Tensor] = []
    for step in range(12):
        if held:
            torch._foreach_zero_(held)
        square(model, wfbp.rank(), step)
        optimizer.synchronize()
        if step == 8:
            held = [p.grad for p in model.parameters() if p.grad is not None]
        with optimizer.skip_synchronize():
            optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
        if not held:
            optimizer.zero_grad()
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=False))
    compare(model, reference, "at the end", 1e-12)

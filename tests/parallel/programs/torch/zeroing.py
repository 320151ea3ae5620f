"""How programs forget gradients, in every form, at every moment."""

from __future__ import annotations

import weakref

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    check_training,
    data,
    due,
    mlp,
    momentum,
    square,
    twins,
)

check = Checks()


@check
def zero_grad_discards_a_part() -> None:
    def zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        (1e3 * model[-1](data(0, wfbp.rank(), 4, 7))).sum().backward()  # type: ignore[index]
        optimizer.zero_grad()

    check_training(mlp(5, 7, 3), square, momentum, zero=zero)


@check
def gradients_kept_from_step_to_step() -> None:
    both = twins()
    for step in range(6):
        both.add(step)
        both.update()
        if due(step, 6):
            both.compare(f"step {step}")


@check
def gradients_that_were_discarded_are_let_go() -> None:
    """Passes between steps whose gradients are not used, as for saliency maps, on one rank only."""
    for to_none in (True, False):
        both = twins()
        model, optimizer = both[:2]
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
            both.step(step)
        both.compare(f"to_none={to_none}")


@check
def gradients_stay_the_same_tensors() -> None:
    """A program may keep a list of them if they are zeroed in place."""
    both = twins(schedule="layerwise")
    model, optimizer = both[:2]
    held: list[torch.Tensor] = []
    for step in range(12):
        if held:
            torch._foreach_zero_(held)
        square(model, wfbp.rank(), step)
        optimizer.synchronize()
        if step == 8:
            held = [p.grad for p in model.parameters() if p.grad is not None]
        both.step_synchronized()
        both.follow(step)
        if not held:
            optimizer.zero_grad()
        assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=False))
    both.compare("at the end")

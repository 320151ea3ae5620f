"""Parameters without gradient in some steps, on some ranks, or ever."""

from __future__ import annotations

from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    Branches,
    adamw,
    check_training,
    data,
    mlp,
    momentum,
    square,
)
from wfbp.runtime import process

check = Checks()


@check
def missing_on_some_ranks() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [(rank + step) % 3]).backward()

    check_training(Branches(), backward, adamw, steps=20)


@check
def missing_on_all_ranks_in_some_steps() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [0, 1] if step % 3 else [0]).backward()

    model, _ = check_training(Branches(), backward, adamw, steps=20)
    assert model.branches[2].weight.grad is None


@check
def seldom_used() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [1] if step in (9, 30) and rank == 1 else [0]).backward()

    check_training(Branches(), backward, adamw, steps=40)


@check
def no_gradient_at_all_in_some_steps() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        if (step + rank) % 3 and step % 5:
            square(model, rank, step)

    check_training(mlp(5, 7, 3), backward, adamw, steps=20)


@check
def zeros_left_behind_do_not_start_anew() -> None:
    """A gradient that stays zero is no news: planning must come to an end."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [0, 1] if step == 0 else [0]).backward()

    model = Branches()
    optimizer = wfbp.torch.DistributedOptimizer(momentum(model.parameters()))
    phases = []
    is_tried = process.current("a check").config.schedule == "auto"
    for step in range(240 if is_tried else 40):
        optimizer.zero_grad(set_to_none=False)
        backward(model, wfbp.rank(), step)
        optimizer.step()
        phases.append(optimizer.report()["phase"])
    begun = [phase for phase in phases if phase != "warm-up"]
    assert phases[len(phases) - len(begun) :] == begun, phases  # it warms up once
    assert not begun or "installed" in begun, phases

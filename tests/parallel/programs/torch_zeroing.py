"""How programs forget gradients, in every form, at every moment."""

from __future__ import annotations

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.training import (
    adamw,
    check_training,
    compare,
    data,
    due,
    mlp,
    momentum,
    square,
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

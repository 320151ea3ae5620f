"""Several backward passes per step."""

from __future__ import annotations

from torch import nn

from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    Branches,
    adamw,
    check_training,
    data,
    mlp,
    passes,
)

check = Checks()


@check
def accumulation_declared() -> None:
    check_training(
        mlp(5, 7, 3), lambda m, r, s: passes(m, r, s, 3), adamw, backward_passes_per_step=3
    )


@check
def accumulation_declared_into_views() -> None:
    check_training(
        mlp(5, 7, 3),
        lambda m, r, s: passes(m, r, s, 3),
        adamw,
        backward_passes_per_step=3,
        zero=lambda m, opt: opt.zero_grad(set_to_none=False),
    )


@check
def accumulation_learned() -> None:
    check_training(mlp(5, 7, 3), lambda m, r, s: passes(m, r, s, 2), adamw)


@check
def accumulation_learned_into_views() -> None:
    check_training(
        mlp(5, 7, 3),
        lambda m, r, s: passes(m, r, s, 2),
        adamw,
        zero=lambda m, opt: opt.zero_grad(set_to_none=False),
    )


@check
def accumulation_of_changing_length() -> None:
    check_training(
        mlp(5, 7, 3), lambda m, r, s: passes(m, r, s, (1, 3, 2, 4)[s % 4]), adamw, steps=16
    )


@check
def accumulation_that_differs_between_ranks() -> None:
    """A pass in which only one rank uses a parameter must not cost the others theirs."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        for k in range(1 + (step % 2 == rank % 2)):
            model(data(10 * step + k, rank, 4, 5), [0, 1] if k else [0]).backward()

    check_training(Branches(), backward, adamw, steps=12)


@check
def accumulation_shorter_at_the_end_of_an_epoch() -> None:
    check_training(
        mlp(5, 7, 3),
        lambda m, r, s: passes(m, r, s, 1 if s % 5 == 4 else 3),
        adamw,
        steps=30,
        backward_passes_per_step=3,
    )


@check
def accumulation_met_late_into_views() -> None:
    """One step of more passes than ever before, whose gradients lie where averages did."""
    for only in (None, 1):
        check_training(
            mlp(5, 7, 3),
            lambda m, r, s, only=only: passes(m, r, s, 1 + (s == 9 and only in (None, r))),
            adamw,
            zero=lambda m, opt: opt.zero_grad(set_to_none=False),
        )

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
    momentum,
)
from wfbp.runtime import process

check = Checks()


@check
def seldom_used() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(data(step, rank, 4, 5), [1] if step in (9, 30) and rank == 1 else [0]).backward()

    check_training(Branches(), backward, adamw, steps=40)


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

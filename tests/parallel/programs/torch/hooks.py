"""Hooks around ``step()``, and the optimizer that a distributed one was made of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import square, twins

check = Checks()


def total_norm(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))  # type: ignore[misc]


@check
def a_step_hook_on_one_rank() -> None:
    """As for a log: the other ranks must not be left behind."""
    both = twins()
    norms: list[float] = []
    if wfbp.rank() == 0:

        def log(*_: Any, model: nn.Module = both.model, norms: list[float] = norms) -> None:
            norms.append(total_norm(model))

        both.optimizer.register_step_pre_hook(log)
    for step in range(12):
        both.step(step)
        wanted = total_norm(both.reference)
        if norms:
            assert abs(norms[-1] - wanted) <= 1e-11 * wanted, step
        both.compare(f"step {step}", 1e-11)


@check
def the_original_does_not_step() -> None:
    """It would step on what one rank has seen. It passes on all other calls."""
    both = twins()
    original = both.optimizer._wfbp_original
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (original, both.plain)
    ]
    for step in range(12):
        original.zero_grad()
        square(both.model, wfbp.rank(), step)
        raises(RuntimeError, "SGD", "DistributedOptimizer() returned", act=original.step)
        both.optimizer.step()
        if step == 8:
            original.load_state_dict(copy.deepcopy(original.state_dict()))
        both.follow(step)
        for scheduler in schedulers:
            scheduler.step()
        both.compare(f"step {step}", 1e-11)

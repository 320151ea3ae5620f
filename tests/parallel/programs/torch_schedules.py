"""Learning-rate schedules, made before and after wrapping."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.training import (
    averaged,
    compare,
    mlp,
    momentum,
    square,
)

check = Checks()


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """Two models with the same parameters."""
    model = mlp(5, 7, 3)
    return model, copy.deepcopy(model)


def train(
    model: nn.Module, optimizer: Any, reference: nn.Module, plain: Any, first: int, last: int
) -> None:
    """Steps of both, which must stay equal."""
    for step in range(first, last):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
        compare(model, reference, f"step {step}", 1e-12)


def scheduled(before: bool, load: bool) -> None:
    model, reference = pair()
    optimizer: Any = momentum(model.parameters())
    plain = momentum(reference.parameters())
    expected = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    if before:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer = wfbp.torch.DistributedOptimizer(optimizer)
    if load:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        wfbp.broadcast_optimizer_state(optimizer, root_rank=0)
    if not before:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for epoch in range(6):
        train(model, optimizer, reference, plain, 3 * epoch, 3 * epoch + 3)
        schedule.step()
        expected.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"], epoch
    assert plain.param_groups[0]["lr"] < 0.01


@check
def scheduler_made_after_wrapping() -> None:
    scheduled(before=False, load=False)


@check
def scheduler_made_before_wrapping() -> None:
    scheduled(before=True, load=False)


@check
def scheduler_made_before_wrapping_and_state_loaded() -> None:
    scheduled(before=True, load=True)

"""Learning-rate schedules, made before and after wrapping."""

from __future__ import annotations

import copy

import torch

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import Twins, momentum, pair

check = Checks()


def scheduled(before: bool, load: bool) -> None:
    model, reference = pair()
    optimizer, plain = momentum(model.parameters()), momentum(reference.parameters())
    expected = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    if before:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    optimizer = wfbp.torch.DistributedOptimizer(optimizer)
    if load:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        wfbp.broadcast_optimizer_state(optimizer, root_rank=0)
    if not before:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    both = Twins(model, optimizer, reference, plain)
    for epoch in range(6):  # four steps each: most end while parameters still travel
        both.train(range(4 * epoch, 4 * epoch + 4), total=24)
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

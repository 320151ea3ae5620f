"""Hooks around ``step()``, and the optimizer that a distributed one was made of."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import averaged, compare, mlp, momentum, square
from tests.support.sharding import SHARDING

check = Checks()

UPDATES = ("auto", "replicated")


def count(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


@check
def step_hooks_run_once_a_step() -> None:
    for update in UPDATES:
        model = mlp(5, 7, 7, 3)
        optimizer = wfbp.torch.DistributedOptimizer(
            momentum(model.parameters()), optimizer_sharding=SHARDING[update]
        )
        seen: list[tuple[str, int]] = []
        optimizer.register_step_pre_hook(lambda o, *_, s=seen: s.append(("before", count(o))))
        optimizer.register_step_post_hook(lambda o, *_, s=seen: s.append(("after", count(o))))
        for step in range(10):
            if step == 6:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            seen.clear()
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
            list(model.parameters())
            assert seen == [("before", 6), ("after", 6)], (update, step, seen)


@check
def step_hooks_see_what_one_process_would() -> None:
    """Averages before, parameters up to date afterwards; both may be changed."""

    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = momentum(params)

        def before(*_: Any) -> None:
            nn.utils.clip_grad_norm_(params, 1e-2)

        def after(*_: Any) -> None:
            with torch.no_grad():
                torch._foreach_mul_(params, 0.9)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer

    for update in UPDATES:
        model = mlp(5, 7, 7, 3)
        wfbp.broadcast_parameters(model.state_dict())
        reference = copy.deepcopy(model)
        inner = make(list(model.parameters()))
        optimizer = wfbp.torch.DistributedOptimizer(inner, optimizer_sharding=SHARDING[update])
        plain = make(list(reference.parameters()))
        for step in range(12):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
            averaged(reference, square, step, wfbp.size())
            plain.step()
            compare(model, reference, f"{update}, step {step}", 1e-11)


@check
def a_step_hook_on_one_rank() -> None:
    """As for a log: the other ranks must not be left behind."""
    for update in UPDATES:
        model = mlp(5, 7, 3)
        wfbp.broadcast_parameters(model.state_dict())
        reference = copy.deepcopy(model)
        optimizer = wfbp.torch.DistributedOptimizer(
            momentum(model.parameters()), optimizer_sharding=SHARDING[update]
        )
        plain = momentum(reference.parameters())
        norms: list[float] = []
        if wfbp.rank() == 0:

            def log(*_: Any, model: nn.Module = model, norms: list[float] = norms) -> None:
                norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]

            optimizer.register_step_pre_hook(log)
        for step in range(12):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
            averaged(reference, square, step, wfbp.size())
            wanted = float(nn.utils.get_total_norm([p.grad for p in reference.parameters()]))  # type: ignore[misc]
            plain.step()
            if norms:
                assert abs(norms[-1] - wanted) <= 1e-11 * wanted, (update, step)
            compare(model, reference, f"{update}, step {step}", 1e-11)


@check
def the_original_does_not_step() -> None:
    """It would step on what one rank has seen. What else it is asked, it passes on."""
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    original = momentum(model.parameters())
    optimizer = wfbp.torch.DistributedOptimizer(original)
    plain = momentum(reference.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(original, 0.9)
    expected = torch.optim.lr_scheduler.ExponentialLR(plain, 0.9)
    for step in range(12):
        original.zero_grad()
        square(model, wfbp.rank(), step)
        raises(RuntimeError, "SGD", "DistributedOptimizer() returned", act=original.step)
        optimizer.step()
        if step == 8:
            original.load_state_dict(copy.deepcopy(original.state_dict()))
        averaged(reference, square, step, wfbp.size())
        plain.step()
        schedule.step()
        expected.step()
        compare(model, reference, f"step {step}", 1e-11)

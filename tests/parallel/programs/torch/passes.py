"""Several backward passes per step, and parameters that get no gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    Branches,
    adamw,
    check_training,
    data,
    due,
    mlp,
    momentum,
    twins,
)
from wfbp.runtime import process

check = Checks()


@check
def accumulation_that_differs_between_ranks() -> None:
    """A pass in which only one rank uses a parameter must not cost the others theirs."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        for k in range(1 + (step % 2 == rank % 2)):
            model(data(10 * step + k, rank, 4, 5), [0, 1] if k else [0]).backward()

    check_training(Branches(), backward, adamw, steps=12)


@check
def accumulation_within_no_sync() -> None:
    """Passes within it count as others do, however many, also if the last uses less of the model,
    or if a step has no other passes."""

    def run(
        model: nn.Module, rank: int, step: int, local: Callable[[], AbstractContextManager[None]]
    ) -> None:
        for k in reversed(range(1 + (step + rank) % 4)):
            # In some steps a pass within it follows one outside.
            with local() if k == 1 + step % 2 or k == 3 else nullcontext():
                batch = data(10 * step + k, rank, 4, 5)
                used = ([k % 3],) if isinstance(model, Branches) else ()
                model(batch, *used).square().mean().backward()

    for model in (Branches(), mlp(5, 7, 3)):
        both = twins(adamw, model)
        optimizer = both.optimizer
        for step in range(12):
            both.follow(step, lambda m, r, s: run(m, r, s, nullcontext))
            optimizer.zero_grad(set_to_none=isinstance(model, Branches))
            if step == 5:
                with optimizer.no_sync():
                    run(model, wfbp.rank(), step, nullcontext)
                    for act in (optimizer.step, optimizer.synchronize):
                        raises(RuntimeError, "within no_sync()", act=act)
                optimizer.zero_grad(set_to_none=isinstance(model, Branches))
            if step == 7:
                with optimizer.no_sync():
                    run(model, wfbp.rank(), step, nullcontext)
            else:
                run(model, wfbp.rank(), step, optimizer.no_sync)
            optimizer.step()
            if due(step, 12):
                both.compare(f"step {step}")
    optimizer.set_backward_passes_per_step(2)
    raises(RuntimeError, "backward_passes_per_step=1", act=optimizer.no_sync().__enter__)


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

"""Programs that read parameters, or call the model, at unusual moments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    Twins,
    adamw,
    check_training,
    data,
    due,
    mlp,
    same,
    square,
    twins,
)
from wfbp.runtime import process

check = Checks()


def beside(between: Callable[[nn.Module], torch.Tensor], steps: int = 14) -> None:
    """Train; what is done to the model between steps must be what a single process does.

    Nothing else reads parameters there, but after some steps.
    """
    both = twins(adamw, mlp(5, 7, 7, 3))
    for step in range(steps):
        both.step(step)
        same(*map(between, both.nets), f"step {step}: between steps", 1e-11)
        if due(step, steps):
            both.compare(f"step {step}")


@check
def evaluation_between_steps() -> None:
    def evaluate(model: nn.Module) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            out: torch.Tensor = model(data(99, 0, 4, 5))
        model.train()
        return out

    beside(evaluate)
    beside(lambda model: model.state_dict()["4.weight"].clone())
    beside(lambda model: torch.cat([p.detach().flatten() for p in model.parameters()]))
    beside(lambda model: copy.deepcopy(model)(data(99, 0, 4, 5)).detach())


@check
def data_read_after_synchronize() -> None:
    both = twins()
    held = list(both.model.parameters())
    for step in range(10):
        both.step(step)
        if step % 3 == 2:
            both.optimizer.zero_grad()
            both.optimizer.synchronize()
            for p, q in zip(held, both.reference.parameters(), strict=True):
                same(p.data, q.data, f"step {step}", 1e-12)


@check
def several_forwards_per_step() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        first = model(data(step, rank, 4, 5))
        second = model(data(step + 100, rank, 4, 5))
        with torch.no_grad():
            model(data(step + 200, rank, 4, 5))
        (first.square().mean() + (second * first.detach()).mean()).backward()

    check_training(mlp(5, 7, 3), backward, adamw)


@check
def activation_checkpointing() -> None:
    for reentrant in (False, True):

        def backward(model: nn.Module, rank: int, step: int, reentrant: bool = reentrant) -> None:
            x = data(step, rank, 4, 5).requires_grad_()
            hidden = checkpoint(model[:2], x, use_reentrant=reentrant)  # type: ignore[index]
            hidden = checkpoint(model[2:4], hidden, use_reentrant=reentrant)  # type: ignore[index]
            model[4:](hidden).square().mean().backward()  # type: ignore[index]

        check_training(mlp(5, 7, 7, 3), backward, adamw)


@check
def compiled_model() -> None:
    train_compiled("eager")
    all_reduces = process.current("a check").config.schedule == "layerwise"
    if wfbp.size() == 2 and all_reduces:  # takes seconds
        train_compiled(wfbp.torch.compile_backend("aot_eager", piece_bytes=100))


def train_compiled(backend: Any) -> None:
    # It warns of hooks on all modules, which exist while forward is measured.
    warnings.filterwarnings("ignore", "Using `torch.compile")
    warnings.filterwarnings("ignore", module="torch._dynamo")
    both = twins(adamw)
    compiled = torch.compile(both.model, backend=backend)
    for step in range(10):
        both.optimizer.zero_grad()
        square(compiled, wfbp.rank(), step)
        both.optimizer.step()
        both.follow(step)
        if due(step, 10):
            both.compare(f"step {step}")


@check
def training_that_just_ends() -> None:
    """The optimizer goes while parameters travel: the model must be whole all the same."""
    for steps in range(1, 12, 2):
        both = twins()
        for step in range(steps):
            both.step(step)
        both = both._replace(optimizer=None)
        both.equal(f"after {steps}", 1e-12)


@check
def phases_of_fine_tuning() -> None:
    """First all layers, then the head alone by another optimizer, while the first one is kept."""
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    kept = []
    for phase in range(3):
        for net in (model, reference):
            net[0].requires_grad_(phase == 0)
        mine, other = (
            adamw(net.parameters() if phase == 0 else net[2].parameters())
            for net in (model, reference)
        )
        both = Twins(model, wfbp.torch.DistributedOptimizer(mine), reference, other)
        kept.append(both)
        for step in range(8):
            both.step(step)
        both.equal(f"phase {phase}", 1e-12)

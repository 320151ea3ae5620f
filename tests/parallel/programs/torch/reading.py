"""Programs that read parameters, or call the model, at unusual moments."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    Twins,
    adamw,
    due,
    mlp,
    same,
    square,
    twins,
)
from wfbp.runtime import process

check = Checks()


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

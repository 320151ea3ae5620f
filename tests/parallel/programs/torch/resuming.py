"""Training that goes on with another number of ranks, and optimizers that are gone too early."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    adamw,
    averaged,
    data,
    mlp,
    momentum,
    same,
    square,
)
from tests.support.sharding import SHARDING
from wfbp.runtime import process as runtimes

check = Checks()

SAMPLES = 6
STEPS = 9


def part(model: nn.Module, rank: int, step: int, size: int) -> None:
    """The backward pass of one of ``size`` ranks that share out a step's samples."""
    mine = data(step, 0, SAMPLES, 5)[rank::size]
    model(mine).square().mean().backward()


def run(saved: bytes, size: int, first: int, make: Any, update: str) -> bytes:
    """Load on ``size`` ranks, go on, and save; from rank 0."""
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(
        make(model.parameters()), optimizer_sharding=SHARDING[update]
    )
    if saved:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    else:
        wfbp.broadcast_parameters(model.state_dict())
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        part(model, wfbp.rank(), step, size)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


@check
def state_loads_into_another_number_of_ranks() -> None:
    """Down to one rank and up again, like training that nothing interrupted."""
    everybody = MPI.COMM_WORLD
    config = runtimes.current("check").config
    sizes = [everybody.size, max(1, everybody.size - 1), 1, everybody.size]
    ways = ((adamw, "auto"), (momentum, "auto"), (adamw, "replicated"))
    torch.manual_seed(5)
    references = [mlp(5, 7, 3)]
    references += [copy.deepcopy(references[0]) for _ in ways[1:]]
    plains = [make(model.parameters()) for (make, _), model in zip(ways, references, strict=True)]
    saved = [b""] * len(ways)
    wfbp.shutdown()
    try:
        for phase, size in enumerate(sizes):
            group = everybody.Split(everybody.rank < size, everybody.rank)
            if everybody.rank < size:
                wfbp.init(group, config=config)
                for k, way in enumerate(ways):
                    torch.manual_seed(5)
                    saved[k] = run(saved[k], size, phase * STEPS, *way)
                wfbp.shutdown()
            group.Free()
            saved = everybody.bcast(saved)
            for k, (model, plain) in enumerate(zip(references, plains, strict=True)):
                for step in range(phase * STEPS, (phase + 1) * STEPS):
                    plain.zero_grad()
                    part(model, 0, step, 1)
                    plain.step()
                check_saved(saved[k], model, plain, f"way {k}, phase {phase}")
    finally:
        wfbp.init(config=config)


def check_saved(saved: bytes, model: nn.Module, plain: torch.optim.Optimizer, where: str) -> None:
    """Raise unless what was saved is the state of this training."""
    found = torch.load(io.BytesIO(saved), weights_only=True)
    for name, wanted in model.state_dict().items():
        same(found["model"][name], wanted, f"{where}: {name}", 1e-11)
    state = plain.state_dict()["state"]
    assert found["optimizer"]["state"].keys() == state.keys()
    for k, values in state.items():
        for key, wanted in values.items():
            value = found["optimizer"]["state"][k][key]
            same(torch.as_tensor(value), torch.as_tensor(wanted), f"{where}: {key}", 1e-11)


@check
def a_state_that_does_not_fit_changes_nothing() -> None:
    model, reference = mlp(5, 7, 3), mlp(5, 7, 3)
    reference.load_state_dict(model.state_dict())
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    plain = adamw(reference.parameters())
    unfit: dict[str, Any] = {"state": {}, "param_groups": []}
    for step in range(12):
        if step == 8:
            raises(ValueError, "groups", act=lambda: optimizer.load_state_dict(unfit))
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.step()
        averaged(reference, square, step, wfbp.size())
        plain.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        same(p.detach(), q.detach(), "at the end", 1e-12)


@check
def an_optimizer_that_is_dropped_sees_its_parameters_home() -> None:
    """Nobody reads them until it has been collected, on some ranks long before on others."""
    for update in ("auto", "replicated"):
        model = mlp(5, 7, 7, 3)
        wfbp.broadcast_parameters(model.state_dict())
        reference = copy.deepcopy(model)
        optimizer = wfbp.torch.DistributedOptimizer(
            momentum(model.parameters()), optimizer_sharding=SHARDING[update]
        )
        plain = momentum(reference.parameters())
        for step in range(8):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
            averaged(reference, square, step, wfbp.size())
            plain.step()
            if wfbp.rank() == 0 and step == 7:
                del optimizer
                gc.collect()
        wfbp.torch.barrier()
        if wfbp.rank():
            del optimizer
        gc.collect()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            same(p.detach(), q.detach(), update, 1e-12)

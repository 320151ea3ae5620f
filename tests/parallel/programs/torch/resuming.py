"""States that are saved, loaded and copied, also on other numbers of ranks."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    adamw,
    compare,
    data,
    equal,
    mlp,
    momentum,
    same,
    square,
    twins,
)
from wfbp.runtime import process as runtimes

check = Checks()

SAMPLES = 6
STEPS = 9


def part(model: nn.Module, rank: int, step: int, size: int) -> None:
    """The backward pass of one of ``size`` ranks that share out a step's samples."""
    mine = data(step, 0, SAMPLES, 5)[rank::size]
    model(mine).square().mean().backward()


def run(saved: bytes, size: int, first: int, make: Any) -> bytes:
    """Load on ``size`` ranks, go on, and save; from rank 0."""
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(make(model.parameters()))
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
    ways = (adamw, momentum)
    torch.manual_seed(5)
    references = [mlp(5, 7, 3)]
    references += [copy.deepcopy(references[0]) for _ in ways[1:]]
    plains = [make(model.parameters()) for make, model in zip(ways, references, strict=True)]
    saved = [b""] * len(ways)
    wfbp.shutdown()
    try:
        for phase, size in enumerate(sizes):
            group = everybody.Split(everybody.rank < size, everybody.rank)
            if everybody.rank < size:
                wfbp.init(group, config=config)
                for k, way in enumerate(ways):
                    torch.manual_seed(5)
                    saved[k] = run(saved[k], size, phase * STEPS, way)
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
    both = twins(adamw)
    unfit: dict[str, Any] = {"state": {}, "param_groups": []}
    for step in range(12):
        if step == 8:
            raises(ValueError, "groups", act=lambda: both.optimizer.load_state_dict(unfit))
        both.step(step)
    both.equal("at the end", 1e-12)


@check
def an_optimizer_that_is_dropped_completes_its_parameters() -> None:
    """They are read only after it has been collected, on some ranks long before on others."""
    both = twins(model=mlp(5, 7, 7, 3))
    for step in range(8):
        both.step(step)
        if wfbp.rank() == 0 and step == 7:
            both = both._replace(optimizer=None)
            gc.collect()
    wfbp.torch.barrier()
    both = both._replace(optimizer=None)
    gc.collect()
    both.equal("at the end", 1e-12)


@check
def state_loads_into_a_plain_optimizer() -> None:
    both = twins(adamw)
    both.train(range(7))
    resumed = mlp(5, 7, 3)
    resumed.load_state_dict(both.model.state_dict())
    single = adamw(resumed.parameters())
    single.load_state_dict(both.optimizer.state_dict())
    for step in range(7, 12):
        for net, opt in ((resumed, single), (both.reference, both.plain)):
            opt.zero_grad()
            square(net, 0, step)
            opt.step()
        compare(resumed, both.reference, f"step {step}", 1e-12)


@check
def a_wrapped_model_can_be_saved_and_copied() -> None:
    model = mlp(5, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(adamw(model.parameters()))
    square(model, wfbp.rank(), 0)
    optimizer.step()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        equal(other.parameters(), model.parameters(), "copy", 0.0)
        square(other, wfbp.rank(), 0)  # must not disturb what is exchanged
    optimizer.zero_grad()
    square(model, wfbp.rank(), 1)
    optimizer.step()

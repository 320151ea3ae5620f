"""Programs that do more around ``step()`` than training needs, or read parameters there."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    Backward,
    Branches,
    Twins,
    adamw,
    data,
    due,
    equal,
    mlp,
    momentum,
    square,
    twins,
)
from wfbp.core import planners
from wfbp.runtime import process
from wfbp.runtime.tuning.tuner import TuningPhase

check = Checks()


def beside(
    model: nn.Module,
    make: Callable[[Any], torch.optim.Optimizer],
    backward: Backward = square,
    *,
    steps: int = 14,
    after: Callable[[nn.Module, Any, int], object] = lambda model, optimizer, step: None,
    tolerance: float = 1e-11,
) -> Any:
    """Train beside one process; parameters are compared at the end, and not read before."""
    reference = copy.deepcopy(model)
    optimizer = wfbp.torch.DistributedOptimizer(make(model))
    both = Twins(model, optimizer, reference, make(reference))
    for step in range(steps):
        both.step(step, backward)
        after(model, optimizer, step)
        after(reference, both.plain, step)
    both.equal("at the end", tolerance)
    return optimizer


class Simple(torch.optim.Optimizer):
    """Gradient descent whose step a test fills in."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"])  # type: ignore[arg-type]


class Failing(Simple):
    updates_left = 0
    """Until it fails; 0: it does not."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(p, group)
        if self.updates_left:
            self.updates_left -= 1
            if not self.updates_left:
                raise ArithmeticError("as asked")


@check
def state_is_shared_out() -> None:
    """Of Adam's two numbers per element a rank keeps those of its shards, and gives back all."""
    world, ranks = wfbp.size(), wfbp.allgather_object
    for dtype in (torch.float32, torch.float64):
        model = mlp(30, 41, 3).to(dtype)
        wfbp.broadcast_parameters(model.state_dict())
        optimizer: Any = wfbp.torch.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), schedule="ps_layerwise"
        )
        for step in range(12):
            optimizer.zero_grad()
            model(data(step, wfbp.rank(), 4, 30, dtype=dtype)).square().mean().backward()
            optimizer.step()
        if optimizer.report().get("phase", "installed") != "installed":
            continue  # this mode never changes plans
        entries = optimizer.state.values()
        held = sum(v.numel() for e in entries for k, v in e.items() if k.startswith("exp_avg"))
        numel = [p.numel() for p in model.parameters()]
        padding = 0 if world == 1 else 16 // dtype.itemsize * len(numel)
        assert held <= 2 * (sum(numel) / world + padding), (held, numel)
        assert sum(ranks(held)) == 2 * sum(numel), (ranks(held), numel)
        whole = optimizer.state_dict()["state"]
        assert [whole[k]["exp_avg"].numel() for k in range(len(numel))] == numel


@check
def an_optimizer_that_raises() -> None:
    """On every rank, and the program continues: all ranks still have the same parameters."""
    model = mlp(5, 7, 7, 3)
    wfbp.broadcast_parameters(model.state_dict())
    inner = Failing(model.parameters())
    optimizer: Any = wfbp.torch.DistributedOptimizer(inner)
    for step in range(12):
        optimizer.zero_grad()
        square(model, wfbp.rank(), step)
        optimizer.updates_left = {7: 1, 9: 4}.get(step, 0)
        try:
            optimizer.step()
            for p in model.parameters():
                p.detach()
        except ArithmeticError:
            assert step in (7, 9)
    optimizer.zero_grad()
    optimizer.synchronize()
    states = wfbp.allgather_object([p.detach().tolist() for p in model.parameters()])
    assert all(state == states[0] for state in states)


class Caching(nn.Module):
    """Uses parameters of which it keeps another reference, out of everybody's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 400).double()
        self.two = nn.Linear(400, 3).double()
        self.kept = {"weights": [self.one.weight, self.two.weight]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.kept["weights"]
        return torch.tanh(x @ one.T) @ two.T


@check
def parameters_kept_out_of_sight() -> None:
    """That they are read through modules at other times says nothing of forward."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        square(model, rank, step)
        assert sum(float(p.detach().norm()) for p in model.parameters()) > 0

    beside(Caching(), lambda m: momentum(m.parameters()), backward, steps=20)


@check
def plans_that_change_between_steps() -> None:
    """Gathers of the old plan must not overwrite memory of the new one."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        alone = step >= 6 and step % 2 == 0
        chosen = [(rank + step // 2) % 3] if alone else [0, 1, 2]
        model(data(step, rank, 4, 5), chosen).backward()

    def change(model: nn.Module, optimizer: Any, step: int) -> None:
        exchange = getattr(optimizer, "_wfbp_sync", None)
        if exchange is None or step % 2 == 0 or step < 6:
            return
        tuner = exchange.reducer.tuner  # as a trial would, by the next step
        if tuner.phase is not TuningPhase.INSTALLED:
            return
        name = ("ps", "ps_layerwise")[step // 2 % 2]
        plan = planners.plan(name, tuner.trace, tuner.costs)

        def enter() -> None:
            del tuner.complete
            tuner._enter(TuningPhase.INSTALLED, plan, 20)

        tuner.complete, tuner.visit.left = enter, 1

    beside(
        Branches(),
        lambda m: momentum(m.parameters()),
        backward,
        after=change,
        steps=26,
    )


@check
def compiled_model() -> None:
    """Takes seconds."""
    if wfbp.size() != 2 or process.current("a check").config.schedule != "layerwise":
        return
    # It warns of hooks on all modules, which exist while forward is measured.
    warnings.filterwarnings("ignore", "Using `torch.compile")
    warnings.filterwarnings("ignore", module="torch._dynamo")
    both = twins(adamw)
    backend = wfbp.torch.compile_backend("aot_eager", piece_bytes=100)
    compiled = torch.compile(both.model, backend=backend)
    for step in range(10):
        both.optimizer.zero_grad()
        square(compiled, wfbp.rank(), step)
        both.optimizer.step()
        both.follow(step)
        if due(step, 10):
            both.compare(f"step {step}")


@check
def a_thread_that_reads_between_steps() -> None:
    """It finds what the last step made, under a lock of the program's."""
    both = twins(model=mlp(5, 300, 300, 3))
    held, lock, end = list(both.model.parameters()), threading.Lock(), threading.Event()
    history = [[p.detach().clone() for p in held]]
    taken: list[tuple[int, list[torch.Tensor]]] = []

    def read() -> None:
        while not end.is_set():
            with lock:
                taken.append((len(history) - 1, [p.detach().clone() for p in held]))
            time.sleep(2e-3)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(12):
        square(both.model, wfbp.rank(), step)
        both.follow(step)
        with lock:
            both.optimizer.step()
            history.append([p.detach().clone() for p in both.reference.parameters()])
        both.optimizer.zero_grad()
    end.set()
    thread.join()
    for number, found in taken:
        equal(found, history[number], f"after step {number}", 1e-11)
    assert taken


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

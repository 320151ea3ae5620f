"""Programs that do more around ``step()`` than training needs."""

from __future__ import annotations

import copy
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
    data,
    equal,
    mlp,
    momentum,
    square,
    twins,
)
from wfbp.core import planners
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


class Rebinding(Simple):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.data = p.data - group["lr"] * p.grad


class Slowing(Simple):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] / group["count"])  # type: ignore[arg-type]


class Normed(Simple):
    """By tensor, with new state in every step, and sensitive to the mode that it runs in."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        assert not torch.is_autocast_enabled("cpu")
        assert p.grad is not None
        state = self.state[p]
        state["sum"] = 0.9 * state.get("sum", 0.0) + p.grad
        p.sub_(group["lr"] * state["sum"] / (1.0 + state["sum"].norm()))


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
def an_optimizer_that_replaces_memory() -> None:
    beside(mlp(5, 7, 3), lambda m: Rebinding(m.parameters()))


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


class Scaled(nn.Module):
    """A group of its own for a parameter that only the first rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(5, 40, 3)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x) * self.scale
        return out

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": self.net.parameters()}, {"params": [self.scale], "lr": 0.02}]


@check
def groups_count_on_every_rank() -> None:
    optimizer = beside(Scaled(), lambda m: Slowing(m.groups()))
    counts = [group["count"] for group in optimizer.state_dict()["param_groups"]]
    assert counts == [14, 14], counts


@check
def a_rate_that_is_a_tensor() -> None:
    """A scheduler writes to it between the steps."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        rate = torch.tensor(0.1, dtype=torch.float64)
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    def slower(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.7)

    beside(mlp(5, 7, 3), make, after=slower)


@check
def modes_of_whoever_reads() -> None:
    """An update is none of autocast's, and leaves no inference tensors behind."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(data(step, rank, 4, 5, dtype=torch.float32))
        out.float().square().mean().backward()

    def evaluate(model: nn.Module, optimizer: Any, step: int) -> None:
        with torch.inference_mode():
            model(data(99, 0, 4, 5))

    beside(mlp(5, 7, 3).float(), lambda m: Normed(m.parameters()), backward, tolerance=0.05)
    beside(mlp(5, 7, 3), lambda m: Normed(m.parameters()), after=evaluate)


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
def parameters_synchronized_between_steps() -> None:
    """With the gradients zeroed before, there is nothing to average, and nothing to step on."""
    both = twins()
    model, optimizer = both[:2]
    held = list(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(12):
        if step % 3:
            square(model, wfbp.rank(), step)
            optimizer.step()
        else:
            loss = model(data(step, wfbp.rank(), 4, 5)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        optimizer.synchronize()
        both.follow(step)
        equal([p.data for p in held], both.reference.parameters(), f"step {step}", 1e-11)
    both.step_synchronized()

"""Programs that rebuild a model, or hold its parameters themselves, while it is trained.

``torch_rebuilding.py OUT MODE [NAME ...]`` under mpirun; the mode has to install plans.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    adamw,
    averaged,
    data,
    mlp,
    momentum,
    same,
    square,
    step_both,
)
from tests.support.sharding import SHARDING

check = Checks()

LATE = 9
"""The step before which something happens: the plan has long been installed."""


def decoupled(
    model: nn.Module, update: str, make: Callable[[Any], torch.optim.Optimizer] = momentum
) -> Any:
    """Every tensor travels by itself, and is waited for where it is read."""
    return wfbp.torch.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        schedule="ps_layerwise",
        optimizer_sharding=SHARDING[update],
    )


def twins() -> tuple[nn.Sequential, nn.Sequential]:
    """Two models with the same parameters, on all ranks."""
    model = mlp(5, 7, 7, 3)
    wfbp.broadcast_parameters(model.state_dict())
    return model, copy.deepcopy(model)


def alike(model: nn.Module, reference: nn.Module, where: str) -> None:
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        same(p.detach(), q.detach(), where, 1e-11)


def beside(happens: Callable[[nn.Sequential], Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Train beside one process; from some step on by what is made of the model then.

    Updates are carried out when parameters are read: what is read without being noticed is always
    out of date.
    """
    model, reference = twins()
    optimizer, plain = decoupled(model, "replicated", adamw), adamw(reference.parameters())
    held, wanted = list(model.parameters()), list(reference.parameters())
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [model, reference]
    for step in range(2 * LATE):
        if step == LATE:
            calls = [happens(model), happens(reference)]

        def backward(net: nn.Module, rank: int, step: int, calls: Any = calls) -> None:
            calls[net is reference](data(step, rank, 4, 5)).square().mean().backward()

        step_both(model, optimizer, reference, plain, step, backward)
    optimizer.synchronize_parameters()
    for p, q in zip(held, wanted, strict=True):
        same(p.detach(), q.detach(), "at the end", 1e-10)


@check
def layers_made_anew() -> None:
    def happens(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
        for k in (0, 2, 4):
            old = model[k]
            new = nn.Linear(old.in_features, old.out_features).double()
            new.weight, new.bias = old.weight, old.bias
            model[k] = new
        return model

    beside(happens)


class Holding(nn.Module):
    """Reads what it was given, under other names."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.matrix, self.offset = old.weight, old.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.matrix, self.offset)


@check
def layers_that_take_parameters_over() -> None:
    def happens(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
        model[2] = Holding(model[2])
        return model

    beside(happens)


@check
def a_module_that_keeps_a_list_is_made_late() -> None:
    def happens(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
        class Listed(Holding):
            def __init__(self, old: nn.Linear) -> None:
                super().__init__(old)
                self.both = [old.weight, old.bias]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return functional.linear(x, *self.both)

        model[2] = Listed(model[2])
        return model

    beside(happens)


@check
def a_model_that_is_traced_late() -> None:
    def happens(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced: Callable[[torch.Tensor], torch.Tensor] = torch.jit.trace(  # type: ignore[no-untyped-call]
                model, data(0, 0, 4, 5)
            )
        return traced

    beside(happens)


@check
def a_function_that_is_compiled_late() -> None:
    def happens(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
        warnings.filterwarnings("ignore", "Using `torch.compile")
        warnings.filterwarnings("ignore", module="torch._dynamo")
        return torch.compile(lambda x: model(x), backend="eager")

    beside(happens)


@check
def steps_that_are_compiled() -> None:
    """Around the optimizer's methods the compiler breaks its graph."""

    def whole(net: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    def synchronized(net: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    def clipped(net: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()

    def evaluated(net: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    for schedule, ways in (
        ("layerwise", (whole, clipped)),
        ("ps_layerwise", (whole, synchronized, evaluated, None)),
    ):
        for train in ways:
            model, reference = twins()
            optimizer: Any = wfbp.torch.DistributedOptimizer(
                adamw(model.parameters()), schedule=schedule
            )
            plain = adamw(reference.parameters())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler
                call = torch.compile(train or optimizer.step, backend="eager")
                for step in range(LATE - 3):
                    x = data(step, wfbp.rank(), 4, 5)
                    if train is None:
                        optimizer.zero_grad()
                        model(x).square().mean().backward()
                        call()
                    else:
                        call(model, optimizer, x)
                    averaged(reference, square, step, wfbp.size())
                    plain.step()
            alike(model, reference, f"{schedule}: {train}")


@check
def parameters_held_by_the_program() -> None:
    """Up to date after one call, on a rank of its own choice; which is no step of training."""
    model, reference = twins()
    for update in ("auto", "replicated"):
        optimizer, plain = decoupled(model, update), momentum(reference.parameters())
        held, wanted = list(model.parameters()), list(reference.parameters())
        for step in range(2 * LATE):
            step_both(model, optimizer, reference, plain, step)
            if step % wfbp.size() == wfbp.rank():
                optimizer.synchronize_parameters()
                for p, q in zip(held, wanted, strict=True):
                    same(p.detach(), q.detach(), f"{update}: step {step}", 1e-12)
            if step % 5 == 4:
                optimizer.synchronize_parameters()
                with torch.no_grad():
                    for p in (*held, *wanted):
                        p.clamp_(-0.5, 0.5)
            if step % 4 == 3:
                optimizer.zero_grad()
                optimizer.synchronize()
        if wfbp.size() > 1:
            assert optimizer.report()["steps"] == 2 * LATE
        optimizer.synchronize_parameters()


@check
def changing_and_keeping_what_still_travels() -> None:
    """Tensors that the program holds are changed, and kept for a backward, right behind a step."""
    for update in ("auto", "replicated"):
        model, reference = twins()
        optimizer, plain = decoupled(model, update), momentum(reference.parameters())
        held, wanted = dict(model.named_parameters()), dict(reference.named_parameters())

        def backward(
            net: nn.Module, rank: int, step: int, held: Any = held, wanted: Any = wanted
        ) -> None:
            own = wanted if net is reference else held  # noqa: B023 - called in the same turn
            penalty = sum((p.square().sum() for p in own.values()), torch.zeros(()))
            (net(data(step, rank, 4, 5)).square().mean() + 1e-2 * penalty).backward()

        for step in range(2 * LATE):
            step_both(model, optimizer, reference, plain, step, backward)
            for params in (held, wanted):
                with torch.no_grad():
                    params["2.weight"].clamp_(-0.2, 0.2)
                    params["0.bias"].data.mul_(0.9)
        alike(model, reference, update)


@check
def a_group_that_is_refused() -> None:
    """All goes on as before."""
    model, reference = twins()
    optimizer, plain = decoupled(model, "auto", adamw), adamw(reference.parameters())
    for step in range(2 * LATE):
        if step == LATE:
            phase = optimizer.report().get("phase")
            refused: list[tuple[Any, type[Exception]]] = [
                ([model[2].weight], ValueError),
                ([1], TypeError),
                ([nn.Parameter(torch.ones(2, device="meta"))], ValueError),
            ]
            for params, kind in refused[: 3 if wfbp.size() > 1 else 2]:
                with pytest.raises(kind):
                    optimizer.add_param_group({"params": params})
            assert len(optimizer.param_groups) == 1
            assert optimizer.report().get("phase") == phase
        step_both(model, optimizer, reference, plain, step)
    alike(model, reference, "after a group was refused")


@check
def another_state() -> None:
    """Momentum is reset by giving the optimizer a new dictionary."""
    model, reference = twins()
    for update in ("auto", "replicated"):
        optimizer, plain = decoupled(model, update, adamw), adamw(reference.parameters())
        for step in range(2 * LATE):
            if step == LATE:
                optimizer.state = defaultdict(dict)
                plain.state = defaultdict(dict)
            step_both(model, optimizer, reference, plain, step)
        found, wanted = optimizer.state_dict()["state"], plain.state_dict()["state"]
        assert found.keys() == wanted.keys()
        for k in wanted:
            for name in ("exp_avg", "exp_avg_sq"):
                same(found[k][name], wanted[k][name], f"{update}: {name} of {k}", 1e-11)
        alike(model, reference, update)


@check
def another_state_and_another_wrapper() -> None:
    """The original has the state, too."""
    model, reference = twins()
    for update in ("auto", "replicated"):
        original, plain = adamw(model.parameters()), adamw(reference.parameters())
        for number in range(2):
            optimizer = wfbp.torch.DistributedOptimizer(
                original,
                model.named_parameters(),
                schedule="ps_layerwise",
                optimizer_sharding=SHARDING[update],
            )
            for step in range(LATE):
                if step == LATE - 2 and number == 0:
                    optimizer.state = defaultdict(dict)
                    plain.state = defaultdict(dict)
                step_both(model, optimizer, reference, plain, step)
        alike(model, reference, update)
        found, wanted = optimizer.state_dict()["state"], plain.state_dict()["state"]
        assert found.keys() == wanted.keys()
        assert found[0]["step"] == wanted[0]["step"] == LATE + 2


class Renewing(torch.optim.SGD):
    """Has another dictionary after each step."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.state = defaultdict(dict, self.state)
        return result


@check
def an_optimizer_that_renews_its_state() -> None:
    model, reference = twins()

    def make(params: Any) -> torch.optim.Optimizer:
        return Renewing(params, lr=0.05, momentum=0.9)

    for update in ("auto", "replicated"):
        optimizer, plain = decoupled(model, update, make), make(reference.parameters())
        for step in range(2 * LATE):
            step_both(model, optimizer, reference, plain, step)
        alike(model, reference, update)


@check
def parameters_that_are_parts_of_one_tensor() -> None:
    """PyTorch counts their changes together."""
    for update in ("auto", "replicated"):
        model = nn.Sequential(*(nn.Linear(5, 5, bias=k == 1) for k in range(3))).double()
        whole = torch.stack([layer.weight.detach() for layer in model])  # type: ignore[union-attr]
        wfbp.broadcast_parameters({"whole": whole})
        for layer, part in zip(model, whole.unbind(), strict=True):
            layer.weight = nn.Parameter(part)
        wfbp.broadcast_parameters(model.state_dict())
        reference = copy.deepcopy(model)
        optimizer, plain = decoupled(model, update), momentum(reference.parameters())
        for step in range(2 * LATE):
            step_both(model, optimizer, reference, plain, step)
        alike(model, reference, update)


@check
def two_losses_and_a_step_for_each() -> None:
    """The second backward comes behind the first step, which has not changed what it needs."""
    for update in ("auto", "replicated"):
        model = nn.ModuleList([mlp(5, 3), mlp(5, 7, 3)])
        wfbp.broadcast_parameters(model.state_dict())
        optimizer = decoupled(model, update)
        for step in range(2 * LATE):
            optimizer.zero_grad()
            losses = [part(data(step, wfbp.rank(), 4, 5)).square().mean() for part in model]
            for loss in losses:
                loss.backward()
                optimizer.step()
                model.zero_grad()
        optimizer.synchronize_parameters()

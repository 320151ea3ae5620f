"""Programs that rebuild a model, or hold its parameters themselves, while it is trained.

``torch_rebuilding.py OUT MODE [NAME ...]`` under mpirun; the mode has to install plans.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.training import (
    Twins,
    adamw,
    data,
    equal,
    mlp,
    twins,
)
from wfbp.torch import pending

check = Checks()

LATE = 9
"""The step before which something happens: the plan has long been installed."""


def decoupled(make: Any = None, model: nn.Module | None = None) -> Twins:
    """Every tensor travels by itself, and is waited for where it is read."""
    return twins(
        make,
        model or mlp(5, 7, 7, 3),
        named=True,
        schedule="ps_layerwise",
    )


def made_anew(model: nn.Sequential) -> nn.Module:
    for k in (0, 2, 4):
        old = model[k]
        new = nn.Linear(old.in_features, old.out_features).double()
        new.weight, new.bias = old.weight, old.bias
        model[k] = new
    return model


class Holding(nn.Module):
    """Reads what it was given, under other names."""

    def __init__(self, old: nn.Linear) -> None:
        super().__init__()
        self.matrix, self.offset = old.weight, old.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.matrix, self.offset)


class Listed(Holding):
    def __init__(self, old: nn.Linear) -> None:
        super().__init__(old)
        self.both = [old.weight, old.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, *self.both)


def with_second_layer(kind: type[Holding], model: nn.Sequential) -> nn.Module:
    model[2] = kind(model[2])
    return model


def traced(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.jit.trace(model, data(0, 0, 4, 5))  # type: ignore[no-any-return,no-untyped-call]


def compiled(model: nn.Sequential) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(lambda x: model(x), backend="eager")


CHANGES: list[Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = [
    made_anew,
    partial(with_second_layer, Holding),
    partial(with_second_layer, Listed),
    traced,
    compiled,
]


@check
def models_that_are_rebuilt_late() -> None:
    """Layers made anew, or that take parameters over; then traced, or compiled."""
    for change in CHANGES:
        both = decoupled(adamw)
        held, wanted = (list(net.parameters()) for net in both.nets)
        calls = list(both.nets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's compilers
            for step in range(2 * LATE):
                if step == LATE:
                    calls = list(map(change, both.nets))

                def backward(
                    net: nn.Module, rank: int, step: int, calls: Any = calls, both: Any = both
                ) -> None:
                    call = calls[net is both.reference]
                    call(data(step, rank, 4, 5)).square().mean().backward()

                both.step(step, backward)
        both.optimizer.synchronize_parameters()
        equal(held, wanted, f"{change}", 1e-10)


def a_step(net: nn.Module, optimizer: Any, x: torch.Tensor, how: str) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(x).square().mean()
        loss.backward()
        return loss

    if how == "closure":
        optimizer.step(closure)
        return
    closure()
    if how == "clipped":
        optimizer.clip_grad_norm_(1e9)
    if how == "synchronized":
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()


@check
def steps_that_are_compiled() -> None:
    """Around the optimizer's methods the compiler breaks its graph."""
    for schedule, ways in (
        ("layerwise", ("plain", "clipped")),
        ("ps_layerwise", ("plain", "synchronized", "closure")),
    ):
        for how in ways:
            both = twins(adamw, mlp(5, 7, 7, 3), schedule=schedule)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler
                call = torch.compile(a_step, backend="eager")
                for step in range(LATE - 3):
                    call(both.model, both.optimizer, data(step, wfbp.rank(), 4, 5), how)
                    both.follow(step)
            both.equal(f"{schedule}: {how}", 1e-11)
    cached: Any = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert not cached(pending._before_forward.__code__), "a hook was compiled"


@check
def parameters_held_by_the_program() -> None:
    """Up to date after one call, on a rank that chooses when; which is no step of training."""
    both = decoupled()
    optimizer = both.optimizer
    held, wanted = (list(net.parameters()) for net in both.nets)
    for step in range(2 * LATE):
        both.step(step)
        if step % wfbp.size() == wfbp.rank():
            optimizer.synchronize_parameters()
            equal(held, wanted, f"step {step}", 1e-12)
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
    """Tensors that the program holds are changed, and kept for a backward, right after a step."""
    both = decoupled()
    held = {net: dict(net.named_parameters()) for net in both.nets}

    def backward(net: nn.Module, rank: int, step: int, held: Any = held) -> None:
        penalty = sum((p.square().sum() for p in held[net].values()), torch.zeros(()))
        (net(data(step, rank, 4, 5)).square().mean() + 1e-2 * penalty).backward()

    for step in range(2 * LATE):
        both.step(step, backward)
        for params in held.values():
            with torch.no_grad():
                params["2.weight"].clamp_(-0.2, 0.2)
                params["0.bias"].data.mul_(0.9)
    both.equal("at the end", 1e-11)


@check
def a_group_that_is_refused() -> None:
    """Training continues as before."""
    both = decoupled(adamw)
    model, optimizer = both[:2]
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
        both.step(step)
    both.equal("after a group was refused", 1e-11)


@check
def another_state_and_another_wrapper() -> None:
    """The original has the state, too."""
    both = decoupled(adamw)
    original = both.optimizer._wfbp_original
    for number in range(2):
        if number:
            optimizer = wfbp.torch.DistributedOptimizer(original, schedule="ps_layerwise")
            both = both._replace(optimizer=optimizer)
        for step in range(LATE):
            if step == LATE - 2 and number == 0:
                for each in (both.optimizer, both.plain):
                    each.state = defaultdict(dict)
            both.step(step)
    both.equal("at the end", 1e-11)
    found, wanted = (o.state_dict()["state"] for o in (both.optimizer, both.plain))
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
    both = decoupled(partial(Renewing, lr=0.05, momentum=0.9))
    for step in range(2 * LATE):
        both.step(step)
    both.equal("at the end", 1e-11)


@check
def parameters_that_are_parts_of_one_tensor() -> None:
    """PyTorch counts their changes together."""
    model = nn.Sequential(*(nn.Linear(5, 5, bias=k == 1) for k in range(3))).double()
    whole = torch.stack([layer.weight.detach() for layer in model])  # type: ignore[union-attr]
    for layer, part in zip(model, whole.unbind(), strict=True):
        layer.weight = nn.Parameter(part)
    both = decoupled(model=model)
    for step in range(2 * LATE):
        both.step(step)
    both.equal("at the end", 1e-11)


@check
def two_losses_and_a_step_for_each() -> None:
    """The second backward comes after the first step, which has not changed what it needs."""
    model: Any = nn.ModuleList([mlp(5, 3), mlp(5, 7, 3)])
    optimizer = decoupled(model=model).optimizer
    for step in range(2 * LATE):
        optimizer.zero_grad()
        losses = [part(data(step, wfbp.rank(), 4, 5)).square().mean() for part in model]
        for loss in losses:
            loss.backward()
            optimizer.step()
            model.zero_grad()
    optimizer.synchronize_parameters()

"""The declared optimizers treat every element by itself: sharded and whole updates are the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import optim

from wfbp.torch.wrapping import ELEMENTWISE, why_not_elementwise

STEPS, RANKS = 12, 3
OTHERS = {"Adafactor", "LBFGS", "Muon", "Optimizer", "SparseAdam"}
"""They look at whole tensors, or at no dense ones."""

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ASGD": [{"t0": 3.0}],
    "Adagrad": [{"initial_accumulator_value": 0.1, "lr_decay": 0.01}],
    "Adam": [{"amsgrad": True}, {"maximize": True, "fused": True}],
    "AdamW": [{"amsgrad": True, "foreach": True}],
    "NAdam": [{"decoupled_weight_decay": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "SGD": [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}],
}
CLASSES = {n: c for n, c in inspect.getmembers(optim, inspect.isclass) if c.__module__ != "x"}


def run(kind: Any, options: dict[str, Any], parts: int) -> torch.Tensor:
    """A parameter after some steps, cut into parts."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(7, 9, generator=generator).view(-1)
    params = [torch.nn.Parameter(part.clone()) for part in whole.chunk(parts)]
    optimizer = kind(params, **options)
    for _ in range(STEPS):
        gradient = torch.randn(63, generator=generator) * 10.0 ** torch.arange(63).remainder(5)
        for param, grad in zip(params, gradient.chunk(parts), strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return torch.cat([param.detach() for param in params])


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_of_pytorch_is_declared_rightly(name: str) -> None:
    kind = CLASSES[name]
    assert (kind in ELEMENTWISE) == (name not in OTHERS)
    if kind in ELEMENTWISE:
        for options in [{}, {"weight_decay": 0.01}, *OPTIONS.get(name, [])]:
            if name == "Rprop" and "weight_decay" in options:
                continue
            whole = run(kind, options, 1)
            assert torch.allclose(run(kind, options, RANKS), whole, rtol=1e-5, atol=1e-6), options


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3))]


class Derived(optim.SGD):
    pass


def test_who_is_declared() -> None:
    assert not why_not_elementwise(optim.Adam(params()), False)
    assert why_not_elementwise(Derived(params()), False)
    assert not why_not_elementwise(Derived(params()), True)
    assert why_not_elementwise(optim.Adam(params(), differentiable=True), False)
    assert "whole tensors" in why_not_elementwise(optim.LBFGS(params()), True)

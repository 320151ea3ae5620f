"""Optimizers of which each does something in its own way, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import optim

Make = Callable[[torch.nn.Module], optim.Optimizer]


class Normalized(optim.Optimizer):
    """Descent by gradients over the norm of their own tensor, with momentum."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(0.9).add_(p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * state["momentum"] / (1.0 + state["momentum"].norm()))


ELEMENTWISE: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": optim.SGD,
    "sgd foreach": partial(optim.SGD, momentum=0.9, dampening=0.1, foreach=True),
    "sgd fused": partial(optim.SGD, momentum=0.9, fused=True),
    "adam amsgrad": partial(optim.Adam, amsgrad=True),
    "adam maximize": partial(optim.Adam, maximize=True),
    "adam foreach": partial(optim.Adam, foreach=True),
    "adam fused": partial(optim.Adam, fused=True),
    "adamw fused": partial(optim.AdamW, fused=True, amsgrad=True),
    "rmsprop": optim.RMSprop,
    # A larger epsilon: the default divides rounding errors by a small difference.
    "rmsprop centered": partial(optim.RMSprop, momentum=0.9, centered=True, foreach=True, eps=0.1),
    "adagrad": partial(optim.Adagrad, lr_decay=0.01, initial_accumulator_value=0.1),
    "adadelta": partial(optim.Adadelta, eps=1e-2),
    "adamax": optim.Adamax,
    "nadam": partial(optim.NAdam, decoupled_weight_decay=True),
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
}
"""Their update can be shared out by elements."""

PER_TENSOR: dict[str, Callable[..., optim.Optimizer]] = {
    "adafactor": optim.Adafactor,
    "normalized": Normalized,
}
"""These look at whole tensors: every rank updates all of each."""

if hasattr(optim, "Muon"):  # which came late
    PER_TENSOR["muon"] = optim.Muon

MATRICES_ONLY = ("muon",)
REAL_ONLY = ("adafactor", "muon", "sgd fused", "adam fused", "adamw fused")
"""PyTorch refuses complex parameters for these."""

COUPLED = {"LBFGS", "SparseAdam"}
"""Optimizers of PyTorch that are not among these: they cannot do with decoupled gradients."""

ALL = ELEMENTWISE | PER_TENSOR


def made(groups: Callable[[torch.nn.Module], list[dict[str, Any]]]) -> dict[str, Make]:
    """What makes each optimizer for a model, whose groups have rates and weight decays."""

    def make(name: str, model: torch.nn.Module) -> optim.Optimizer:
        found = groups(model)
        if name in MATRICES_ONLY:
            found = [group for group in found if all(p.dim() == 2 for p in group["params"])]
        if name in REAL_ONLY:
            for group in found:
                group["params"] = [p for p in group["params"] if not p.is_complex()]
        return ALL[name](found)

    return {name: partial(make, name) for name in ALL}

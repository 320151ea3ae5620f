"""What becomes of the optimizer that a distributed one was made of."""

from __future__ import annotations

import types
from typing import Any

import torch

_ANSWERED = ("zero_grad", "state_dict", "load_state_dict", "add_param_group")

PATCHED = ("step", *_ANSWERED)
"""Attributes of an optimizer that may belong to what was made of it, or to a scheduler."""


def patch_original(original: torch.optim.Optimizer, distributed: torch.optim.Optimizer) -> None:
    """Let the original refuse to step, and otherwise do what the distributed one does.

    It would step on what this rank alone has seen, and its state may be shards.
    """
    name = type(original).__name__

    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            f"this {name} was made into a distributed optimizer, and its own step() would not "
            "average gradients over the ranks; call step() of what DistributedOptimizer() returned"
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # nothing for a scheduler here
    original.__dict__["step"] = types.MethodType(step, original)
    for answered in _ANSWERED:
        original.__dict__[answered] = getattr(distributed, answered)


def restore_original(original: torch.optim.Optimizer) -> None:
    """Let the original be as it was."""
    for name in PATCHED:
        original.__dict__.pop(name, None)


def bare_step(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> Any:
    """The step of a class, bound to an optimizer, without the calls of hooks around it."""
    step: Any = kind.step
    return types.MethodType(step.__wrapped__ if getattr(step, "hooked", False) else step, optimizer)

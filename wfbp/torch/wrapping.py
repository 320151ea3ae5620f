"""How a distributed optimizer takes the place of the one it is made of."""

from __future__ import annotations

import types
from typing import Any

import torch

from wfbp.runtime.runtime import Runtime
from wfbp.torch.optimizer_interface import DistributedOptimizerBase

_WRAPPED = "_wfbp_wrapped"
"""Attribute of an optimizer: what was last made of it, and may hold shards of its state."""

_ANSWERED = ("zero_grad", "state_dict", "load_state_dict", "add_param_group")

PATCHED = ("step", *_ANSWERED)
"""Attributes of an optimizer that may belong to what was made of it, or to a scheduler."""


def _patch_original(original: torch.optim.Optimizer, distributed: torch.optim.Optimizer) -> None:
    """Let the original refuse to step, and otherwise do what the distributed one does.

    It would step on this rank's gradients alone, and its state may be shards.
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


def _restore_original(original: torch.optim.Optimizer) -> None:
    """Let the original be as it was."""
    for name in PATCHED:
        original.__dict__.pop(name, None)


def bare_step(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> Any:
    """The step of a class, bound to an optimizer, without the calls of hooks around it."""
    step: Any = kind.step
    return types.MethodType(step.__wrapped__ if getattr(step, "hooked", False) else step, optimizer)


def unwrap(original: torch.optim.Optimizer, runtime: Runtime | None) -> None:
    """Undo an earlier wrapping of an optimizer, if there was one; ``runtime`` is of the next.

    Raises ``RuntimeError`` if shards of its state were lost with another runtime.
    """
    previous: Any = original.__dict__.pop(_WRAPPED, None)
    if previous is not None:
        previous._wfbp_release(runtime)
        _restore_original(original)


def note_wrapped(
    original: torch.optim.Optimizer, distributed: DistributedOptimizerBase, runtime: Runtime | None
) -> None:
    """Record an optimizer's wrapping, and make it refuse to step where there are more ranks."""
    original.__dict__[_WRAPPED] = distributed
    if runtime is not None and runtime.size > 1:
        _patch_original(original, distributed)

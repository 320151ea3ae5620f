"""The optimizer that a distributed one is made of: its parameters, and how its place is taken."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import torch

from wfbp.runtime.arguments import ReducerOptions
from wfbp.torch import tensors
from wfbp.torch.own_methods import own_method_names

_WRAPPED = "_wfbp_wrapped"
"""Attribute of an optimizer: what was last made of it, and may hold shards of its state."""

_REPLACED = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")
"""Methods of the original that the distributed optimizer replaces, beside its own further ones."""


def named_params(
    optimizer: torch.optim.Optimizer,
    known: list[tuple[str, torch.Tensor]] | None,
    complete: bool,
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in forward order, each with its first name; without those of
    integers, which never have a gradient. ``ValueError`` for a name that is given twice, or lacking
    if ``complete``."""
    owned = {
        id(p): (f"group{g}.param{k}", p)
        for g, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
    }
    differentiable = {
        k: (n, p) for k, (n, p) in owned.items() if p.is_floating_point() or p.is_complex()
    }
    owned = differentiable or owned
    if known is None:
        return list(owned.values())
    names = [name for name, _ in known]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"named_parameters has names twice: {', '.join(twice)}")
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, p in known:
        if id(p) in owned:
            first.setdefault(id(p), (name, p))
    missing = [pair for k, pair in owned.items() if k not in first]
    if missing and complete:
        shown = ", ".join(name for name, _ in missing[:5])
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters ({shown}); pass "
            "the named_parameters() of every module that it optimizes, or none"
        )
    return [*first.values(), *missing]


def check_params(named: Sequence[tuple[str, torch.Tensor]], options: ReducerOptions) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless these gradients can be reduced so."""
    for name, param in named:
        tensors.check(name, param)
        if param.requires_grad and param.grad_dtype is not param.dtype:
            raise ValueError(
                f"{name} is {param.dtype} and its grad_dtype is {param.grad_dtype}; gradients "
                "travel in the element type of their parameters, so set no grad_dtype"
            )
    options.check([tensors.spec(name, param) for name, param in named])


def wrapped_of(optimizer: torch.optim.Optimizer) -> Any:
    """The last wrapper of an optimizer, or None."""
    return vars(optimizer).get(_WRAPPED)


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's instance attributes, as the program has set them."""
    wrapped = wrapped_of(optimizer)
    if wrapped is None:
        return vars(optimizer)
    watched: dict[str, Any] = wrapped._wfbp_watched
    own = {k: v for k, v in vars(optimizer).items() if k not in _REPLACED}
    replaced = [*_REPLACED, *(k for k, v in watched.items() if own.pop(k, None) is v)]
    before: dict[str, Any] = wrapped._wfbp_before
    return own | {k: before[k] for k in replaced if k in before}


def take_place(distributed: Any, refuses: bool) -> None:
    """Let a distributed optimizer take its original's place, and that of an earlier one.

    ``refuses``: the original's own step, which would not average gradients, becomes an error.
    ``_wfbp_bare`` keeps the original's own methods.
    """
    original = distributed._wfbp_original
    attributes = dict(own_attributes(original))
    for name in vars(original).keys() - attributes.keys():
        del vars(original)[name]
    vars(original).update(attributes)
    names = own_method_names(original) if refuses else []
    distributed._wfbp_watched = {name: _watched(distributed, name) for name in names}
    replaced = (*_REPLACED, *names)
    distributed._wfbp_before = {k: attributes[k] for k in replaced if k in attributes}
    distributed._wfbp_bare = {name: getattr(original, name) for name in _REPLACED}
    vars(original)[_WRAPPED] = distributed
    if not refuses:
        return
    kind = type(original).__name__

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = distributed._wfbp_calls
        if calls and calls[-1] not in ("", "step"):  # by one of its methods
            return distributed.step(*args, **kwargs)
        raise RuntimeError(
            f"this {kind} was made into a distributed optimizer, and its own step() would not "
            "average gradients over the ranks; call step() of what DistributedOptimizer() returned"
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # nothing for a scheduler here
    vars(original).update(distributed._wfbp_watched)
    vars(original).update({name: getattr(distributed, name) for name in _REPLACED})
    vars(original)["step"] = types.MethodType(step, original)


def _watched(distributed: Any, name: str) -> Any:
    """A further method, which averages gradients first unless a method or a step calls it. Programs
    and their objects may hold the original."""
    method, calls = getattr(distributed._wfbp_original, name), distributed._wfbp_calls

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if calls and calls[-1]:
            return method(*args, **kwargs)
        return distributed._wfbp_call(name, method, *args, **kwargs)

    return call

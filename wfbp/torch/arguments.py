"""What the arguments of DistributedOptimizer come to: named parameters and a way to update them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from wfbp.torch import tensors
from wfbp.torch.nature import UpdateCoupling, probe_optimizer

UPDATES = ("auto", "sharded", "replicated")


def check_update(update: str) -> None:
    """Raise ``ValueError`` unless there is such an update."""
    if update not in UPDATES:
        raise ValueError(f"update is {update!r}; expected one of {', '.join(UPDATES)}")


def chosen_coupling(optimizer: torch.optim.Optimizer, update: str) -> UpdateCoupling:
    """What the optimizer does to its tensors, as far as the caller lets that count.

    Raises:
        ValueError: the optimizer does not allow this update.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(tensors.is_dense(p) for p in params):
        return UpdateCoupling.COUPLED
    nature = probe_optimizer(optimizer)
    if update == "sharded" and nature is not UpdateCoupling.ELEMENTWISE:
        raise ValueError(
            f"update is 'sharded', but {type(optimizer).__name__} does not treat every element by "
            f"itself (it is {nature.value}); use 'auto' or 'replicated'"
        )
    if update == "replicated" and nature is UpdateCoupling.ELEMENTWISE:
        return UpdateCoupling.PER_TENSOR
    return nature


def named_pairs(named_parameters: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """The pairs of name and parameter that a caller passed.

    Raises:
        TypeError: something else was passed, as ``model.parameters()``.
    """
    if isinstance(named_parameters, torch.nn.Module):
        raise TypeError("named_parameters is a module; pass model.named_parameters()")
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "named_parameters must be pairs of name and parameter, found a "
                f"{type(pair).__qualname__}; pass model.named_parameters()"
            )
    return pairs


def named_params(
    optimizer: torch.optim.Optimizer,
    known: list[tuple[str, torch.Tensor]] | None,
    complete: bool,
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in forward order, each with a unique name.

    A parameter with several names goes by the first. Frozen ones that can never have a gradient,
    because they are integers, are left out.

    Raises:
        ValueError: a name is given twice, or a name is missing where they must be ``complete``.
    """
    owned = {
        id(p): (f"group{g}.param{k}", p)
        for g, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
    }
    differentiable = {key: pair for key, pair in owned.items() if _differentiable(pair[1])}
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


def param_ids(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """The ids of the parameters in an optimizer's groups."""
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def check_known(optimizer: torch.optim.Optimizer, known: Collection[int]) -> None:
    """Raise unless the parameters in an optimizer's groups were there when it was wrapped.

    Args:
        optimizer: the distributed one.
        known: ids of parameters.

    Raises:
        RuntimeError: one was put into ``param_groups`` since; it would be stepped with the
            gradients of this rank alone.
    """
    for g, group in enumerate(optimizer.param_groups):
        for k, param in enumerate(group["params"]):
            if id(param) not in known:
                raise RuntimeError(
                    f"{type(optimizer).__name__}: param_groups[{g}]['params'][{k}], of shape "
                    f"{tuple(param.shape)}, was put there after the optimizer was wrapped: its "
                    "gradients are not averaged over the ranks. Add parameters by "
                    "optimizer.add_param_group({'params': [...]}), on every rank"
                )


def _differentiable(param: torch.Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()

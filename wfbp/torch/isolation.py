"""Copies of an optimizer to experiment with, their comparison, and no traces of it."""

from __future__ import annotations

import enum
import math
import random
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

MOST_ELEMENTS = 20_000
"""Of a tensor in an experiment."""


_ULPS = 2
"""Rounding errors that may gather in the steps, in units of the largest element's last place."""


class UnknownError(Exception):
    """The experiment cannot tell."""


def stand_in(optimizer: torch.optim.Optimizer) -> Any:
    """A copy without groups, state and hooks; its constructor is not called.

    Raises:
        UnknownError: it has attributes that cannot be copied.
    """
    made: Any = object.__new__(type(optimizer))
    for key, value in optimizer.__dict__.items():
        if key.startswith("_optimizer_") and key.endswith("_hooks"):
            made.__dict__[key] = OrderedDict()
        elif key not in ("param_groups", "state", "step"):
            # (A scheduler puts its own step() on the instance.)
            made.__dict__[key] = private_copy(value, optimizer, made)
    return made


_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    range,
    slice,
    enum.Enum,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
    torch.memory_format,
)


def private_copy(value: Any, optimizer: Any = None, stand_in: Any = None) -> Any:
    """A copy that shares nothing that can change.

    Args:
        value: an attribute, or part of one.
        optimizer: whose attribute it is.
        stand_in: whose attribute it becomes.

    Raises:
        UnknownError: it cannot be copied without what the optimizer works on.
    """

    def again(inner: Any) -> Any:
        return private_copy(inner, optimizer, stand_in)

    kind = type(value)
    if isinstance(value, _CONSTANT):
        return value
    if kind is torch.Tensor and value.numel() <= MOST_ELEMENTS:
        return value.detach().clone()
    if kind in (list, tuple) and len(value) > 1 and all(type(v) is float for v in value):
        # Were these settings of tensors by their places, all alike would hide it.
        return kind(v * (1.0 - k % 8 / 32) for k, v in enumerate(value))
    if kind in (list, tuple, set, frozenset, deque):
        return kind(map(again, value))
    if kind in (dict, OrderedDict):
        return kind((k, again(v)) for k, v in value.items())
    if kind is defaultdict:
        return defaultdict(value.default_factory, ((k, again(v)) for k, v in value.items()))
    if isinstance(value, types.MethodType) and value.__self__ is optimizer:
        return types.MethodType(value.__func__, stand_in)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        if all(isinstance(cell, _CONSTANT) for cell in cells):
            return value
    elif not isinstance(value, torch.optim.Optimizer | nn.Module) and _is_ordinary(kind):
        copied = object.__new__(kind)
        copied.__dict__.update({k: again(v) for k, v in vars(value).items()})
        return copied
    raise UnknownError(f"{kind.__qualname__} cannot be copied for an experiment")


def _is_ordinary(kind: Any) -> bool:
    """Whether attributes are all there is to an object of this class."""
    special = ("__reduce_ex__", "__reduce__", "__getstate__")
    return all(getattr(kind, n, None) is getattr(object, n, None) for n in special) and all(
        "__slots__" not in vars(base) for base in kind.__mro__
    )


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two values are equal but for rounding."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if torch.equal(one, other):
            return True
        if not one.dtype.is_floating_point:
            return False
        # Elements have been as large as the largest, which has left its rounding error in all.
        finite = one.nan_to_num(0.0, 0.0, 0.0)
        allowed = _ULPS * torch.finfo(one.dtype).eps * float(finite.abs().max())
        return torch.allclose(one, other, rtol=0.0, atol=allowed, equal_nan=True)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(nearly_equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(nearly_equal, one, other))
    if isinstance(one, float):
        return one == other or math.isclose(one, other, rel_tol=1e-12)
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__
    if isinstance(one, (*_CONSTANT, types.FunctionType, set, frozenset)):
        return bool(one == other)
    return nearly_equal(vars(one), vars(other))


@contextmanager
def global_state_kept(devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave random numbers, modes and everybody's hooks as they are."""
    gpus = sorted({d.index for d in devices if d.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()
    hooks: list[dict[Any, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    aside = [dict(table) for table in hooks]
    with torch.random.fork_rng(gpus), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for table in hooks:
            table.clear()
        try:
            yield
        finally:
            for table, held in zip(hooks, aside, strict=True):
                table.update(held)
            random.setstate(python)
            np.random.set_state(numpy)

"""Functions of the top level that choose an adapter by what they are given."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, overload

from wfbp.core.types import Op
from wfbp.runtime.api import array_collectives

if TYPE_CHECKING:
    import optax
    import torch

    from wfbp.torch.optimizer_interface import DistributedOptimizerBase


def _comes_from(value: object, *packages: str) -> bool:
    """Whether a value's class, or one it inherits from, is of these packages; loads nothing."""
    return any(kind.__module__.partition(".")[0] in packages for kind in type(value).__mro__)


def _is_torch(value: object) -> bool:
    return _comes_from(value, "torch")


def _is_jax(value: object) -> bool:
    return _comes_from(value, "jax", "jaxlib")


def _torch() -> ModuleType:
    import wfbp.torch

    return wfbp.torch


def _jax() -> ModuleType:
    import wfbp.jax

    return wfbp.jax


@overload
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> DistributedOptimizerBase: ...
@overload
def DistributedOptimizer(
    optimizer: optax.GradientTransformation, *args: Any, **kwargs: Any
) -> optax.GradientTransformationExtraArgs: ...
def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
    """Wrap an optimizer so that it averages gradients over all ranks while backward computes.

    Args:
        optimizer: a ``torch.optim.Optimizer`` or an optax transformation; see
            ``wfbp.torch.DistributedOptimizer`` and ``wfbp.jax.DistributedOptimizer`` for all other
            arguments.

    Raises:
        TypeError: no adapter for this kind of optimizer.

    Example:
        >>> import torch, wfbp
        >>> wfbp.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = wfbp.DistributedOptimizer(optimizer)
    """
    if _is_torch(optimizer):
        return _torch().DistributedOptimizer(optimizer, *args, **kwargs)
    if _comes_from(optimizer, "optax"):
        return _jax().DistributedOptimizer(optimizer, *args, **kwargs)
    raise TypeError(
        f"no adapter for an optimizer of type {type(optimizer).__module__}."
        f"{type(optimizer).__qualname__}; expected a torch.optim.Optimizer or an optax "
        "transformation. Plain arrays are reduced by wfbp.GradientReducer"
    )


def allreduce(tensor: Any, name: str | None = None, op: Op = Op.AVERAGE) -> Any:
    """Combine a tensor or array over all ranks; see
    ``wfbp.runtime.api.array_collectives.allreduce``.
    """
    if _is_torch(tensor):
        return _torch().allreduce(tensor, name=name, op=op)
    if _is_jax(tensor):
        return _jax().allreduce(tensor, name=name, op=op)
    return array_collectives.allreduce(tensor, name=name, op=op)


def broadcast(tensor: Any, root_rank: int, name: str | None = None) -> Any:
    """The root's tensor or array; see ``wfbp.runtime.api.array_collectives.broadcast``."""
    if _is_torch(tensor):
        return _torch().broadcast(tensor, root_rank, name=name)
    if _is_jax(tensor):
        return _jax().broadcast(tensor, root_rank, name=name)
    return array_collectives.broadcast(tensor, root_rank, name=name)


def allgather(tensor: Any, name: str | None = None) -> Any:
    """Concatenation over ranks; see ``wfbp.runtime.api.array_collectives.allgather``."""
    if _is_torch(tensor):
        return _torch().allgather(tensor, name=name)
    if _is_jax(tensor):
        return _jax().allgather(tensor, name=name)
    return array_collectives.allgather(tensor, name=name)


def broadcast_parameters(parameters: Any, root_rank: int = 0) -> Any:
    """Copy the root's parameters to every rank, in place; JAX's, which cannot change, anew.

    Args:
        parameters: a model's ``state_dict()`` or ``named_parameters()``, a mapping or pairs of
            names and NumPy arrays, or a pytree with JAX arrays.
        root_rank: whose values everybody gets.

    Returns:
        The new tree, for JAX; otherwise None.

    Raises:
        TypeError: values without names.
        DisagreementError: ranks passed different names, shapes or element types.
    """
    if _is_torch(parameters):
        _torch().broadcast_parameters(parameters, root_rank)
        return None
    if "jax" in sys.modules and _jax().state.has_arrays(parameters):
        return _jax().broadcast_parameters(parameters, root_rank)
    try:
        items = dict(parameters)
    except (TypeError, ValueError):
        raise TypeError(
            "parameters must be named; pass a mapping, pairs of names and values, "
            "model.state_dict() or model.named_parameters()"
        ) from None
    if any(_is_torch(value) for value in items.values()):
        _torch().broadcast_parameters(items, root_rank)
    else:
        array_collectives.broadcast_arrays(items, root_rank)
    return None


def broadcast_optimizer_state(optimizer: Any, root_rank: int = 0) -> None:
    """Copy the root's optimizer state to every rank; see ``wfbp.torch``.

    Raises:
        TypeError: no adapter for this kind of optimizer.
    """
    if not _is_torch(optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__qualname__}")
    _torch().broadcast_optimizer_state(optimizer, root_rank)

"""Top-level functions that choose a framework's adapter by their argument."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from wfbp.runtime import process
from wfbp.runtime.api.parameters import broadcast_arrays
from wfbp.runtime.collectives import operands
from wfbp.runtime.collectives.forms import Form
from wfbp.runtime.collectives.operands import Operand, array_operand
from wfbp.runtime.collectives.process_sets import global_process_set
from wfbp.runtime.named.named_lane import NamedOperation

if TYPE_CHECKING:
    import optax
    import torch

    from wfbp.torch.optimizer import DistributedOptimizerBase

_ADAPTERS = {"torch": "wfbp.torch", "jax": "wfbp.jax", "jaxlib": "wfbp.jax", "optax": "wfbp.jax"}
"""By the package that a value's class or a base class is of."""


def _adapter(value: object) -> Any:
    """The adapter of a value's framework, loaded now; None for NumPy's arrays and others."""
    packages = [kind.__module__.partition(".")[0] for kind in type(value).__mro__]
    found = next((_ADAPTERS[name] for name in packages if name in _ADAPTERS), None)
    return None if found is None else import_module(found)


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
        optimizer: a ``torch.optim.Optimizer`` or an optax transformation. Other arguments are those
            of ``wfbp.torch.DistributedOptimizer`` or ``wfbp.jax.DistributedOptimizer``.

    Raises:
        TypeError: no adapter for this kind of optimizer.

    Example:
        >>> import torch, wfbp
        >>> wfbp.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = wfbp.DistributedOptimizer(optimizer)
    """
    adapter = _adapter(optimizer)
    if adapter is None:
        raise TypeError(
            f"no adapter for an optimizer of type {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}; expected a torch.optim.Optimizer or an optax "
            "transformation. Plain arrays are reduced by wfbp.GradientReducer"
        )
    return adapter.DistributedOptimizer(optimizer, *args, **kwargs)


def perform(form: Form, value: Any, **options: Any) -> Any:
    """Run a function of ``wfbp.collectives`` on one value or several of one kind."""
    if form.grouped:
        value = list(value)
    first = value[0] if form.grouped and value else value
    adapter = _adapter(first)
    if adapter is None:
        on_device = hasattr(first, "__cuda_array_interface__")
        operand_of = _device_operand if on_device else array_operand
        name = options.pop("name")

        def make(array: Any, label: str, member: str | None) -> NamedOperation[Any]:
            operand = operand_of(array, form.in_place, label if form.grouped else "array")
            return operands.make_operation(form.kind, operand, member, **options)

        return operands.submit_form(form, value, name, make)
    if adapter.__name__ == "wfbp.torch":
        return getattr(adapter.collectives, form.name)(value, **options)
    act = getattr(adapter, form.name, None)
    if act is None:
        raise TypeError(
            f"{form.name}() takes no arrays of JAX; wfbp.jax has allreduce, allgather, broadcast, "
            "alltoall and reducescatter. Outside of compiled programs pass numpy.asarray(x)"
        )
    for key, default in _NOT_OF_JAX.items():
        given = options.pop(key, default)
        if given is not default and (default is None or given != default):
            raise TypeError(
                f"wfbp.jax.{form.name}() has no {key}. Outside of compiled programs pass "
                "numpy.asarray(x)"
            )
    return act(value, **options)


def _device_operand(value: Any, in_place: bool, label: str) -> Operand:
    """CuPy's array or another one on a device, sent through the host; results are there, too."""
    cupy = import_module("cupy")
    operand = array_operand(cupy.asnumpy(cupy.asarray(value)), label=label)

    def placed(array: Any) -> Any:
        with getattr(value, "device", None) or nullcontext():
            if not in_place:
                return cupy.asarray(array)
            cupy.asarray(value)[...] = cupy.asarray(array)
            return value

    return operand._replace(
        whole=lambda: placed(operand.whole()),
        rows=lambda data, count: placed(operand.rows(data, count)),
    )


_NOT_OF_JAX = {
    "splits": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": global_process_set,
}


def join() -> int:
    """Announce that this rank has no more data, and wait until all ranks have called this.

    Until then this rank contributes zeros to every :func:`allreduce` of the others, and to steps of
    their PyTorch optimizers (see ``wfbp.torch.join``). All other operations raise.

    Returns:
        The rank that called it last, the same on every rank.

    Raises:
        WfbpError: ranks disagree, failed, or did not answer in time.

    Example:
        >>> import wfbp
        >>> wfbp.init()
        >>> wfbp.join() == wfbp.size() - 1
        True
    """
    adapter: Any = sys.modules.get("wfbp.torch", process.operations("join()"))
    last: int = adapter.join()
    return last


def broadcast_parameters(parameters: Any, root_rank: int = 0) -> Any:
    """Copy the root's parameters to every rank: in place, or as a new tree for JAX.

    Args:
        parameters: a model's ``state_dict()``, ``parameters()`` or ``named_parameters()``, a
            mapping or pairs of names and NumPy arrays, or a pytree with JAX arrays. Unnamed
            ``parameters()`` must have the same order on every rank.
        root_rank: rank whose values are sent.

    Returns:
        The new tree, for JAX; otherwise None.

    Raises:
        TypeError: other values without names.
        DisagreementError: ranks passed different names, shapes or element types.
    """
    adapter = _adapter(parameters)
    if adapter is None and "jax" in sys.modules:
        jax_adapter = import_module("wfbp.jax")
        adapter = jax_adapter if jax_adapter.trees.has_arrays(parameters) else None
    if adapter is not None:
        return adapter.broadcast_parameters(parameters, root_rank)
    try:
        listed = parameters if hasattr(parameters, "keys") else list(parameters)
        unnamed = bool(listed) and all(_adapter(each) for each in listed)
        arrays = {} if unnamed else dict(listed)
    except (TypeError, ValueError):
        raise TypeError(
            "parameters must be named; pass a mapping, pairs of names and values, "
            "model.state_dict() or model.named_parameters()"
        ) from None
    adapter = next(filter(None, map(_adapter, listed if unnamed else arrays.values())), None)
    if adapter is not None:
        return adapter.broadcast_parameters(listed, root_rank)
    return broadcast_arrays(arrays, root_rank)


def broadcast_optimizer_state(optimizer: Any, root_rank: int = 0) -> None:
    """Copy the root's optimizer state to every rank; see ``wfbp.torch``.

    Raises:
        TypeError: no adapter for this kind of optimizer.
    """
    adapter = _adapter(optimizer)
    if adapter is None or adapter.__name__ != "wfbp.torch":
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__qualname__}")
    adapter.broadcast_optimizer_state(optimizer, root_rank)

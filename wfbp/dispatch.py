"""Functions of the top level that choose an adapter by what they are given."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from wfbp.core.types import Op
from wfbp.runtime.api import array_collectives
from wfbp.runtime.api.parameters import broadcast_arrays
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.operations import Handle
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.collectives.request import Reduction

if TYPE_CHECKING:
    import jax
    import numpy as np
    import numpy.typing as npt
    import optax
    import torch

    from wfbp.torch.optimizer_interface import DistributedOptimizerBase

T = TypeVar("T", "npt.NDArray[Any]", "torch.Tensor", "jax.Array")
"""What an operation takes and returns."""

Numbers: TypeAlias = "float | Sequence[Any] | np.generic"
"""What NumPy makes an array of."""


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


@overload
def allreduce(
    tensor: T,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@overload
def allreduce(
    tensor: Numbers,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> npt.NDArray[Any]: ...
def allreduce(
    tensor: Any,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Combine a tensor or array over all ranks.

    Where ranks have unequally many calls, those that have no more call :func:`join`.

    Args:
        tensor: a PyTorch tensor (differentiable then), a JAX array, an array of NumPy or CuPy, or
            what NumPy makes one of; same shape and element type on every rank: float16, bfloat16,
            float32, float64, int8, int16, int32, int64, uint8 or bool.
        name: by which ranks find each other's operations, in whatever order each calls them; those
            without one by their order among those of the same function without one. (Of JAX's
            arrays the order decides, and names are compared.)
        op: ``Average``, ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``. The average of
            integers is truncated to an integer.
        prescale_factor: multiplies before the reduction, integers in float64 and truncated.
        postscale_factor: multiplies behind it.
        process_set: the ranks that take part.

    Returns:
        A new tensor or array, of the argument's kind; an array of NumPy for a number or a list.

    Raises:
        TypeError: JAX's arrays, with an argument that ``wfbp.jax.allreduce`` does not have.
        ValueError: an element type that cannot be combined, a name that is pending, or a rank
            outside the process set.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> wfbp.allreduce(np.float32([1, 2]), op=wfbp.Sum) / wfbp.size()
        array([1., 2.], dtype=float32)
    """
    result: Any = _combine(
        "allreduce", tensor, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def allreduce_(
    tensor: T,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Combine a tensor or an array of NumPy or CuPy over ranks, in place; see :func:`allreduce`.

    Returns:
        The argument.

    Raises:
        TypeError: none of these; JAX's arrays cannot change.
        ValueError: as :func:`allreduce`, or an array that is read-only.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> counts = np.ones(3, np.int8)
        >>> wfbp.allreduce_(counts, op=wfbp.Max) is counts
        True
    """
    result: T = _combine(
        "allreduce_", tensor, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def allreduce_async(
    tensor: T,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin to combine a tensor or an array of NumPy or CuPy over ranks; see :func:`allreduce`.

    Returns:
        A handle for :func:`synchronize`, which returns a new one.

    Raises:
        TypeError: an array of JAX.
        ValueError: as :func:`allreduce`.

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> handles = [wfbp.allreduce_async(np.full(2, k), name=f"part {k}") for k in range(3)]
        >>> [int(wfbp.synchronize(handle)[0]) for handle in handles]
        [0, 1, 2]
    """
    result: Handle[T] = _combine(
        "allreduce_async", tensor, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def allreduce_async_(
    tensor: T,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin to combine in place; see :func:`allreduce_`.

    Returns:
        A handle for :func:`synchronize`, which returns the argument; leave that alone until then.
    """
    result: Handle[T] = _combine(
        "allreduce_async_", tensor, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_allreduce(
    tensors: Sequence[T],
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Combine several tensors or arrays over ranks, which travel together; see :func:`allreduce`.

    Args:
        tensors: all of one kind; not of JAX.
        name: of all.
        op: as of :func:`allreduce`.
        prescale_factor: as of :func:`allreduce`.
        postscale_factor: as of :func:`allreduce`.
        process_set: the ranks that take part.

    Returns:
        New ones, in this order.

    Raises:
        TypeError: arrays of JAX.
        ValueError: as :func:`allreduce`; none is combined then.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> wfbp.grouped_allreduce([np.zeros(2), np.ones(1)])
        [array([0., 0.]), array([1.])]
    """
    result: list[T] = _combine(
        "grouped_allreduce", tensors, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_allreduce_(
    tensors: Sequence[T],
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Combine several in place; see :func:`grouped_allreduce` and :func:`allreduce_`."""
    result: list[T] = _combine(
        "grouped_allreduce_", tensors, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_allreduce_async(
    tensors: Sequence[T],
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[T]]:
    """Begin :func:`grouped_allreduce`; one handle for all."""
    result: Handle[list[T]] = _combine(
        "grouped_allreduce_async", tensors, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_allreduce_async_(
    tensors: Sequence[T],
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[T]]:
    """Begin :func:`grouped_allreduce_`; one handle for all."""
    result: Handle[list[T]] = _combine(
        "grouped_allreduce_async_",
        tensors,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return result


@overload
def broadcast(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@overload
def broadcast(
    tensor: Numbers,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> npt.NDArray[Any]: ...
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's tensor or array, on every rank.

    Args:
        tensor: a PyTorch tensor (differentiable then), a JAX array, an array of NumPy or CuPy, or
            what NumPy makes one of; same shape and element type on every rank. Arrays may be of
            any type but Python objects.
        root_rank: whose values everybody gets; its number among all ranks.
        name: as of :func:`allreduce`.
        process_set: the ranks that take part.

    Returns:
        A new one, of the argument's kind.

    Raises:
        TypeError: an argument that ``wfbp.jax.broadcast`` does not have, for JAX's arrays.
        ValueError: a root outside the process set, Python objects, or a name that is pending.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast(np.arange(3), root_rank=0)
        array([0, 1, 2])
    """
    result: Any = _perform(
        "broadcast", tensor, root_rank=root_rank, name=name, process_set=process_set
    )
    return result


def broadcast_(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Copy the root's values to every rank, in place; see :func:`broadcast`.

    Returns:
        The argument, a tensor or an array of NumPy or CuPy.

    Raises:
        TypeError: none of these.
        ValueError: as :func:`broadcast`, or an array that is read-only.
        DisagreementError: on every rank, where they do not match.
    """
    result: T = _perform(
        "broadcast_", tensor, root_rank=root_rank, name=name, process_set=process_set
    )
    return result


def broadcast_async(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin :func:`broadcast`, of no array of JAX; :func:`synchronize` returns a new one."""
    result: Handle[T] = _perform(
        "broadcast_async", tensor, root_rank=root_rank, name=name, process_set=process_set
    )
    return result


def broadcast_async_(
    tensor: T,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin :func:`broadcast_`; leave the argument alone until :func:`synchronize` returns it."""
    result: Handle[T] = _perform(
        "broadcast_async_", tensor, root_rank=root_rank, name=name, process_set=process_set
    )
    return result


@overload
def allgather(
    tensor: T,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@overload
def allgather(
    tensor: Numbers,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> npt.NDArray[Any]: ...
def allgather(
    tensor: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The tensors or arrays of all ranks, concatenated along the first dimension in rank order.

    Args:
        tensor: as of :func:`broadcast`, with at least one dimension; sizes may differ between ranks
            in the first one only.
        name: as of :func:`allreduce`.
        process_set: the ranks that take part.

    Returns:
        A new one, of the argument's kind.

    Raises:
        TypeError: an argument that ``wfbp.jax.allgather`` does not have, for JAX's arrays.
        ValueError: a scalar, Python objects, or a name that is pending.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> len(wfbp.allgather(np.zeros((2, 3)))) == 2 * wfbp.size()
        True
    """
    result: Any = _perform("allgather", tensor, name=name, process_set=process_set)
    return result


def allgather_async(
    tensor: T,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin :func:`allgather`, of no array of JAX; :func:`synchronize` returns a new one."""
    result: Handle[T] = _perform("allgather_async", tensor, name=name, process_set=process_set)
    return result


def grouped_allgather(
    tensors: Sequence[T],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Several all-gathers, of no arrays of JAX; see :func:`allgather`."""
    result: list[T] = _perform("grouped_allgather", tensors, name=name, process_set=process_set)
    return result


def grouped_allgather_async(
    tensors: Sequence[T],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[T]]:
    """Begin :func:`grouped_allgather`; one handle for all."""
    result: Handle[list[T]] = _perform(
        "grouped_allgather_async", tensors, name=name, process_set=process_set
    )
    return result


@overload
def alltoall(
    tensor: T,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T: ...
@overload
def alltoall(
    tensor: T,
    splits: T | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[T, T]: ...
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send every rank rows of its own, and receive what the others send.

    Args:
        tensor: as of :func:`broadcast`, with at least one dimension; sizes may differ between ranks
            in the first one only.
        splits: how many rows each rank gets, whole numbers that add up to all rows; equal parts
            by default. Not of JAX's arrays.
        name: as of :func:`allreduce`.
        process_set: the ranks that take part.

    Returns:
        What arrived, in rank order; with ``splits`` also how many rows came from each rank (int32).

    Raises:
        TypeError: an argument that ``wfbp.jax.alltoall`` does not have, for JAX's arrays.
        ValueError: what cannot be split so, Python objects, or a name that is pending.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> rows, received = wfbp.alltoall(np.arange(2 * wfbp.size()), splits=[2] * wfbp.size())
        >>> len(rows) == sum(received.tolist()) == 2 * wfbp.size()
        True
    """
    return _perform("alltoall", tensor, splits=splits, name=name, process_set=process_set)


@overload
def alltoall_async(
    tensor: T,
    splits: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]: ...
@overload
def alltoall_async(
    tensor: T,
    splits: T | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[T, T]]: ...
def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Begin :func:`alltoall`, of no array of JAX; :func:`synchronize` returns what that does."""
    return _perform("alltoall_async", tensor, splits=splits, name=name, process_set=process_set)


def reducescatter(
    tensor: T,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> T:
    """This rank's rows of what all ranks' tensors or arrays combine to.

    Args:
        tensor: as of :func:`allreduce`, with at least one dimension.
        name: as of :func:`allreduce`.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor: as of :func:`allreduce`.
        postscale_factor: as of :func:`allreduce`.
        process_set: the ranks that take part.

    Returns:
        A new one: rows are shared out as equally as possible, the first ranks get one more.

    Raises:
        TypeError: an argument that ``wfbp.jax.reducescatter`` does not have, for JAX's arrays.
        ValueError: a scalar, an element type that cannot be combined, or a name that is pending.
        DisagreementError: on every rank, where they do not match.

    Example:
        >>> import numpy as np, wfbp
        >>> wfbp.init()
        >>> len(wfbp.reducescatter(np.ones((3 * wfbp.size(), 2))))
        3
    """
    result: T = _combine(
        "reducescatter", tensor, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def reducescatter_async(
    tensor: T,
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[T]:
    """Begin :func:`reducescatter`, of no array of JAX; :func:`synchronize` returns a new one."""
    result: Handle[T] = _combine(
        "reducescatter_async", tensor, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_reducescatter(
    tensors: Sequence[T],
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[T]:
    """Several reduce-scatters, of no arrays of JAX; see :func:`reducescatter`."""
    result: list[T] = _combine(
        "grouped_reducescatter", tensors, name, op, prescale_factor, postscale_factor, process_set
    )
    return result


def grouped_reducescatter_async(
    tensors: Sequence[T],
    name: str | None = None,
    op: Reduction = Op.AVERAGE,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[T]]:
    """Begin :func:`grouped_reducescatter`; one handle for all."""
    result: Handle[list[T]] = _combine(
        "grouped_reducescatter_async",
        tensors,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )
    return result


def join(device: int = -1) -> int:
    """Tell that this rank has no more data, and wait until all ranks have called this.

    Until then this rank contributes zeros to every :func:`allreduce` of the others, and to the
    steps of their distributed optimizers of PyTorch (see ``wfbp.torch.join``). Other operations
    among ranks of which some have joined are an error.

    Args:
        device: ignored; for programs written for Horovod.

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
    if "wfbp.torch" in sys.modules:
        last: int = _torch().join(device)
        return last
    return api.join(device)


def _combine(
    function: str,
    value: Any,
    name: str | None,
    op: Reduction,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Any:
    """The same as :func:`_perform`, of a function that reduces."""
    return _perform(
        function,
        value,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def _perform(function: str, value: Any, **options: Any) -> Any:
    """What the adapter's function of this name does with a value, or several of one kind."""
    sample = value
    if function.startswith("grouped_"):
        value = list(value)
        sample = value[0] if value else None
    if _is_torch(sample):
        return getattr(_torch(), function)(value, **options)
    if not _is_jax(sample):
        return array_collectives.perform(function, value, **options)
    act = getattr(_jax(), function, None)
    if act is None:
        raise TypeError(
            f"{function}() takes no arrays of JAX; wfbp.jax has allreduce, allgather, broadcast, "
            "alltoall and reducescatter. Outside of compiled programs pass numpy.asarray(x)"
        )
    for key, default in _NOT_OF_JAX.items():
        given = options.pop(key, default)
        if given is not default and (default is None or given != default):
            raise TypeError(
                f"wfbp.jax.{function}() has no {key}. Outside of compiled programs pass "
                "numpy.asarray(x)"
            )
    return act(value, **options)


_NOT_OF_JAX = {
    "splits": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": global_process_set,
}


def broadcast_parameters(parameters: Any, root_rank: int = 0) -> Any:
    """Copy the root's parameters to every rank, in place; JAX's, which cannot change, anew.

    Args:
        parameters: a model's ``state_dict()`` or ``named_parameters()``, a mapping or pairs of
            names and NumPy arrays, or a pytree with JAX arrays. PyTorch's tensors may come without
            names, as ``model.parameters()``, and then go by their order.
        root_rank: whose values everybody gets.

    Returns:
        The new tree, for JAX; otherwise None.

    Raises:
        TypeError: other values without names.
        DisagreementError: ranks passed different names, shapes or element types.
    """
    if _is_torch(parameters):
        _torch().broadcast_parameters(parameters, root_rank)
        return None
    if "jax" in sys.modules and _jax().state.has_arrays(parameters):
        return _jax().broadcast_parameters(parameters, root_rank)
    try:
        listed = parameters if hasattr(parameters, "keys") else list(parameters)
        unnamed = bool(listed) and all(map(_is_torch, listed))
        items = {} if unnamed else dict(listed)
    except (TypeError, ValueError):
        raise TypeError(
            "parameters must be named; pass a mapping, pairs of names and values, "
            "model.state_dict() or model.named_parameters()"
        ) from None
    if unnamed or any(_is_torch(value) for value in items.values()):
        _torch().broadcast_parameters(listed if unnamed else items, root_rank)
    else:
        broadcast_arrays(items, root_rank)
    return None


def broadcast_optimizer_state(optimizer: Any, root_rank: int = 0) -> None:
    """Copy the root's optimizer state to every rank; see ``wfbp.torch``.

    Raises:
        TypeError: no adapter for this kind of optimizer.
    """
    if not _is_torch(optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__qualname__}")
    _torch().broadcast_optimizer_state(optimizer, root_rank)

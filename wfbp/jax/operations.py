"""Collectives on JAX arrays, under Horovod's names, inside ``jit`` and outside, differentiable.

Every rank calls the same operations in the same order; what is compiled keeps the order in which
it was traced. A gradient is that of the sum of what all ranks differentiate: if every rank takes
the gradient of its own loss, that is the derivative of the sum of all losses.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from wfbp.core.types import Op, item_bytes
from wfbp.jax.collective import AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, apply
from wfbp.jax.ordering import wait_for_programs
from wfbp.runtime import row_collectives, world
from wfbp.runtime.matching import check_root
from wfbp.runtime.runtime import Runtime


def allreduce(array: Any, name: str | None = None, op: Op = Op.AVERAGE) -> jax.Array:
    """Combine an array over all ranks.

    Its gradient is the all-reduce of the gradient, by the same operation.

    Args:
        array: same shape and element type on every rank; float16, bfloat16, float32, float64,
            int32, int64 or uint8.
        name: for messages.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``; the last three have no
            gradient. The average of integers is truncated to an integer.

    Raises:
        ValueError: an element type that cannot be sent, or no such operation.
        DisagreementError: ranks called different operations.

    Example:
        >>> import jax, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> jax.jit(wfbp.allreduce)(jax.numpy.float32([1, 2]))
        Array([1., 2.], dtype=float32)
    """
    runtime = world.current("allreduce()")
    x = _array(array)
    _check_op(x, op)
    return x if _alone(runtime) else apply(AllReduce(name, op), x)


def broadcast(array: Any, root_rank: int, name: str | None = None) -> jax.Array:
    """The root's array, on every rank.

    Its gradient is the sum of all ranks' gradients on the root, and zero elsewhere.

    Args:
        array: same shape and element type on every rank.
        root_rank: whose values everybody gets.
        name: for messages.

    Raises:
        ValueError: no such rank.
        DisagreementError: ranks called different operations.
    """
    runtime = world.current("broadcast()")
    x = _array(array)
    check_root(runtime, root_rank)
    return x if _alone(runtime) else apply(Broadcast(name, root_rank), x)


def allgather(array: Any, name: str | None = None) -> jax.Array:
    """The arrays of all ranks, concatenated along the first dimension in rank order.

    Its gradient is this rank's rows of the sum of all ranks' gradients.

    Args:
        array: at least one dimension. Sizes may differ between ranks in the first one only, and
            not at all inside ``jit``, where shapes must be known before.
        name: for messages.

    Raises:
        ValueError: a scalar.
        DisagreementError: ranks called different operations, or shapes differ inside ``jit``.
    """
    runtime = world.current("allgather()")
    x = _array(array)
    if x.ndim == 0:
        raise ValueError("allgather needs at least one dimension; found a scalar")
    if _alone(runtime):
        return x
    if is_compiling():
        return apply(AllGather(name, (x.shape[0],) * runtime.size), x)
    wait_for_programs()
    return apply(AllGather(name, row_collectives.count_rows(runtime, x.shape, x.dtype, name)), x)


def reducescatter(array: Any, name: str | None = None, op: Op = Op.AVERAGE) -> jax.Array:
    """This rank's rows of what all ranks' arrays combine to.

    Its gradient is the all-gather of the gradient, divided by the number of ranks for
    ``Average``.

    Args:
        array: same shape and element type on every rank, at least one dimension. Rows are shared
            out as equally as possible; the first ranks get one more where they do not divide.
        name: for messages.
        op: as in :func:`allreduce`.

    Raises:
        ValueError: a scalar, an element type that cannot be sent, or no such operation.
        DisagreementError: ranks called different operations.
    """
    runtime = world.current("reducescatter()")
    x = _array(array)
    if x.ndim == 0:
        raise ValueError("reducescatter needs at least one dimension; found a scalar")
    _check_op(x, op)
    if _alone(runtime):
        return x
    return apply(ReduceScatter(name, row_collectives.equal_rows(x.shape[0], runtime.size), op), x)


def alltoall(array: Any, name: str | None = None) -> jax.Array:
    """Block r of every rank's array, concatenated in rank order, on rank r.

    Its gradient is the same exchange of the gradient.

    Args:
        array: same shape and element type on every rank; its first dimension divides into as
            many blocks as there are ranks.
        name: for messages.

    Raises:
        ValueError: it does not divide.
        DisagreementError: ranks called different operations.
    """
    runtime = world.current("alltoall()")
    x = _array(array)
    if x.ndim == 0 or x.shape[0] % runtime.size:
        raise ValueError(
            f"alltoall: an array of shape {x.shape} does not divide into {runtime.size} blocks of "
            "rows"
        )
    return x if _alone(runtime) else apply(AllToAll(name), x)


def _array(array: Any) -> jax.Array:
    """As JAX sees it; in double precision only where JAX is asked to use it."""
    return jnp.asarray(array)


def _alone(runtime: Runtime) -> bool:
    runtime.check()
    return runtime.size == 1


def _check_op(array: jax.Array, op: Op) -> None:
    item_bytes(array.dtype.name)
    if not isinstance(op, Op):
        raise ValueError(f"op is {op!r}; expected one of {', '.join(map(str, Op))}")


def is_compiling() -> bool:
    """Whether the program is traced for later, so that no other rank need be tracing it now.

    Not so in ``grad`` and ``vmap`` alone: they compute at once.
    """
    return isinstance(jnp.zeros(()), jax.core.Tracer)

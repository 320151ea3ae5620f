"""Differentiable collectives on JAX arrays, one JAX primitive, inside ``jit`` and outside."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from wfbp.core.types import Op, item_bytes, real_dtype
from wfbp.jax.xla_handlers import wait_for_programs
from wfbp.runtime import process
from wfbp.runtime.collectives.operands import array_operand, make_operation
from wfbp.runtime.collectives.process_sets import global_process_set
from wfbp.runtime.consistency import Array, check_root
from wfbp.runtime.named.arithmetic import equal_rows
from wfbp.runtime.named.coordinator import Kind
from wfbp.runtime.runtime import Runtime

Shape: TypeAlias = tuple[int, ...]

LINEAR = frozenset({None, Op.SUM, Op.AVERAGE})


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective and its arguments, the same on every rank; static in compiled programs."""

    kind: Kind
    name: str | None = None
    op: Op = Op.AVERAGE
    root_rank: int | None = None
    rows: tuple[int, ...] = ()

    def result_shape(self, shape: Shape) -> Shape:
        if self.kind is Kind.ALLGATHER:
            return (sum(self.rows), *shape[1:])
        if self.kind is Kind.REDUCESCATTER:
            return (self.rows[process.rank()], *shape[1:])
        return shape

    def run(self, array: Array) -> Array:
        """Run the collective on every rank together."""
        operation = make_operation(
            self.kind,
            array_operand(array),
            None,  # not matched by name, so that ranks in different operations raise
            global_process_set,
            op=self.op,
            root_rank=self.root_rank,
            splits=self.rows or None,  # ranks compare them
            called=f"{self.kind.value} {self.name!r}" if self.name else "",
            sequence="jax",
        )
        done: Array = process.operations(f"{self.kind.value}()").run([operation], is_group=False)
        return done

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        """The argument's cotangent; gradients are those of the sum of all ranks' functions."""
        if self.kind is Kind.ALLGATHER:
            return apply(Collective(Kind.REDUCESCATTER, op=Op.SUM, rows=self.rows), cotangent)
        if self.kind is Kind.REDUCESCATTER:
            whole = apply(Collective(Kind.ALLGATHER, rows=self.rows), cotangent)
            return whole / process.size() if self.op is Op.AVERAGE else whole
        if self.kind is Kind.BROADCAST:
            total = apply(Collective(Kind.ALLREDUCE, op=Op.SUM), cotangent)
            return total if process.rank() == self.root_rank else jnp.zeros_like(total)
        return apply(Collective(self.kind, op=self.op), cotangent)


def apply(collective: Collective, array: Any) -> jax.Array:
    """Run the collective now, or add it to the program that is being traced."""
    result: jax.Array = _primitive.bind(array, collective=collective)
    return result


def _now(array: Any, *, collective: Collective) -> jax.Array:
    wait_for_programs()
    result = collective.run(np.asarray(array))
    if not array.committed:
        return jnp.asarray(result)
    # JAX raises if a sharding over several devices does not fit the new shape.
    placed: jax.Array = jax.device_put(result, array.sharding)
    return placed


def _within(collective: Collective, array: Any) -> Array:
    process.current("a collective").expect_other_threads()
    return collective.run(np.asarray(array))


def _as_callback(array: Any, *, collective: Collective) -> Any:
    if process.is_initialized():
        # XLA may run the program on a thread that has not communicated before.
        process.current("a collective").expect_other_threads()
    result = jax.ShapeDtypeStruct(collective.result_shape(array.shape), array.dtype)
    return io_callback(partial(_within, collective), result, array, ordered=True)


@cache
def _effects() -> Any:
    """The effects of an ordered callback, which JAX keeps in order."""
    return jax.make_jaxpr(lambda: io_callback(_effects, None, ordered=True))().effects


def _abstract(array: Any, *, collective: Collective) -> Any:
    return array.update(shape=collective.result_shape(array.shape)), _effects()


def _jvp(primals: Any, tangents: Any, *, collective: Collective) -> Any:
    (primal,), (tangent,) = primals, tangents
    if collective.op not in LINEAR:
        raise ValueError(
            f"{collective.op.name.title()} over ranks has no gradient; expected Average or Sum. "
            "If none is wanted, pass jax.lax.stop_gradient(x)"
        )
    result = _primitive.bind(primal, collective=collective)
    return result, _primitive.bind(tangent, collective=collective)


def _transpose(cotangent: Any, array: Any, *, collective: Collective) -> Any:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(array.aval)]
    return [collective.transposed(cotangent)]


def _batched(arrays: Any, axes: Any, *, collective: Collective) -> Any:
    # Rows stay in front, so that the mapped dimension is one more of those within a row.
    array = jnp.moveaxis(arrays[0], axes[0], -1)
    return _primitive.bind(array, collective=collective), array.ndim - 1


_primitive = Primitive("wfbp_collective")
_primitive.def_impl(_now)
_primitive.def_effectful_abstract_eval(_abstract)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batched
mlir.register_lowering(_primitive, mlir.lower_fun(_as_callback, multiple_results=False))


def allreduce(array: Any, name: str | None = None, op: Op = Op.AVERAGE) -> jax.Array:
    """Combine an array over all ranks; its gradient is the same all-reduce of the gradient.

    Args:
        array: same shape and element type on every rank; float16, bfloat16, float32, float64,
            complex64, complex128, int32, int64 or uint8.
        name: for messages.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``; the last three have no
            gradient, and are not for complex numbers. The average of integers is truncated.

    Returns:
        The combined array, of the same shape and element type.

    Raises:
        ValueError: an element type that cannot be sent, or an unknown operation.
        DisagreementError: ranks called different operations.

    Example:
        >>> import jax, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> jax.jit(wfbp.allreduce)(jax.numpy.float32([1, 2]))
        Array([1., 2.], dtype=float32)
    """
    runtime = process.current("allreduce()")
    x = jnp.asarray(array)
    _check_op(x, op)
    return x if _alone(runtime) else apply(Collective(Kind.ALLREDUCE, name, op), x)


def broadcast(array: Any, root_rank: int, name: str | None = None) -> jax.Array:
    """Return the root's array on every rank.

    Its gradient is the sum of all ranks' gradients on the root, and zero elsewhere.

    Args:
        array: same shape and element type on every rank.
        root_rank: rank whose array is sent.
        name: for messages.

    Raises:
        ValueError: ``root_rank`` does not exist.
        DisagreementError: ranks called different operations.
    """
    runtime = process.current("broadcast()")
    x = jnp.asarray(array)
    check_root(runtime, root_rank)
    return x if _alone(runtime) else apply(Collective(Kind.BROADCAST, name, root_rank=root_rank), x)


def allgather(array: Any, name: str | None = None) -> jax.Array:
    """Concatenate the arrays of all ranks along the first dimension, in rank order.

    Its gradient is this rank's rows of the sum of all ranks' gradients.

    Args:
        array: at least one dimension. Outside ``jit`` the first may differ between ranks.
        name: for messages.

    Raises:
        ValueError: a scalar.
        DisagreementError: ranks called different operations, or shapes differ inside ``jit``.
    """
    runtime = process.current("allgather()")
    x = jnp.asarray(array)
    if x.ndim == 0:
        raise ValueError("allgather needs at least one dimension; found a scalar")
    if _alone(runtime):
        return x
    if is_compiling():
        return apply(Collective(Kind.ALLGATHER, name, rows=(x.shape[0],) * runtime.size), x)
    wait_for_programs()
    rows = Collective(Kind.ALLGATHER, name).run(np.array(x.shape[:1]))
    return apply(Collective(Kind.ALLGATHER, name, rows=tuple(rows.tolist())), x)


def reducescatter(array: Any, name: str | None = None, op: Op = Op.AVERAGE) -> jax.Array:
    """Combine the arrays of all ranks, and return this rank's rows of the result.

    Its gradient is the all-gather of the gradient, divided by the number of ranks for ``Average``.

    Args:
        array: same shape and element type on every rank, at least one dimension. If its rows do
            not divide evenly, each of the first ranks gets one more.
        name: for messages.
        op: as in :func:`allreduce`.

    Raises:
        ValueError: a scalar, an element type that cannot be sent, or an unknown operation.
        DisagreementError: ranks called different operations.
    """
    runtime = process.current("reducescatter()")
    x = jnp.asarray(array)
    if x.ndim == 0:
        raise ValueError("reducescatter needs at least one dimension; found a scalar")
    _check_op(x, op)
    if _alone(runtime):
        return x
    rows = equal_rows(x.shape[0], runtime.size)
    return apply(Collective(Kind.REDUCESCATTER, name, op, rows=rows), x)


def alltoall(array: Any, name: str | None = None) -> jax.Array:
    """Send block r to rank r; returns the received blocks, concatenated in rank order.

    Its gradient is the same exchange of the gradient.

    Args:
        array: same shape and element type on every rank; the number of ranks divides its first
            dimension.
        name: for messages.

    Raises:
        ValueError: the first dimension is not divisible.
        DisagreementError: ranks called different operations.
    """
    runtime = process.current("alltoall()")
    x = jnp.asarray(array)
    if x.ndim == 0 or x.shape[0] % runtime.size:
        raise ValueError(
            f"alltoall: an array of shape {x.shape} does not divide into {runtime.size} blocks of "
            "rows"
        )
    return x if _alone(runtime) else apply(Collective(Kind.ALLTOALL, name), x)


def _alone(runtime: Runtime) -> bool:
    runtime.check()
    return runtime.size == 1


def _check_op(array: jax.Array, op: Op) -> None:
    item_bytes(real_dtype(array.dtype.name))
    if not isinstance(op, Op):
        raise ValueError(f"op is {op!r}; expected one of {', '.join(map(str, Op))}")
    op.check_dtype(array.dtype.name)


def is_compiling() -> bool:
    """Whether a program is traced to run later; ``grad`` and ``vmap`` alone compute at once."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)

"""Collectives on JAX arrays, under Horovod's names, inside ``jit`` and outside, differentiable.

They are one JAX primitive, which knows how they are differentiated, batched and compiled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from wfbp.core.types import Op, item_bytes
from wfbp.errors import DisagreementError
from wfbp.jax import native
from wfbp.jax.after_programs import wait_for_programs
from wfbp.runtime import process
from wfbp.runtime.api.array_collectives import ArrayOperand
from wfbp.runtime.collectives import calls
from wfbp.runtime.collectives.arithmetic import equal_rows
from wfbp.runtime.collectives.operations import Call
from wfbp.runtime.collectives.process_sets import global_process_set
from wfbp.runtime.consistency import Array, check_root
from wfbp.runtime.runtime import Runtime

Shape: TypeAlias = tuple[int, ...]

LINEAR = frozenset({Op.SUM, Op.AVERAGE})


@dataclass(frozen=True, slots=True)
class Collective(ABC):
    """One kind of collective with its arguments, the same on every rank.

    Args:
        name: for messages.
    """

    name: str | None

    @abstractmethod
    def result_shape(self, shape: Shape) -> Shape:
        """Shape of what becomes of an array of this shape."""

    @abstractmethod
    def run(self, runtime: Runtime, array: Array) -> Array:
        """Do it, on every rank together."""

    @abstractmethod
    def transposed(self, cotangent: jax.Array) -> jax.Array:
        """The cotangent of the argument, from that of the result: again a collective.

        Gradients are those of the sum of what all ranks differentiate.
        """

    @property
    def reduces_by(self) -> Op:
        """How arrays combine, where they do; decides whether there is a derivative."""
        return Op.SUM


@dataclass(frozen=True, slots=True)
class AllReduce(Collective):
    """All ranks' arrays combined."""

    op: Op

    def result_shape(self, shape: Shape) -> Shape:
        return shape

    def run(self, runtime: Runtime, array: Array) -> Array:
        operand = ArrayOperand(array)
        call = calls.allreduce(operand, self.name, global_process_set, self.op, 1.0, 1.0)
        return _in_order(call)

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        return apply(AllReduce(None, self.op), cotangent)

    @property
    def reduces_by(self) -> Op:
        return self.op


@dataclass(frozen=True, slots=True)
class Broadcast(Collective):
    """The root's array."""

    root_rank: int

    def result_shape(self, shape: Shape) -> Shape:
        return shape

    def run(self, runtime: Runtime, array: Array) -> Array:
        operand = ArrayOperand(array)
        return _in_order(calls.broadcast(operand, self.name, global_process_set, self.root_rank))

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        total = apply(AllReduce(None, Op.SUM), cotangent)
        is_root = process.rank() == self.root_rank
        return total if is_root else jnp.zeros_like(total)


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """All ranks' rows, one after another."""

    rows: tuple[int, ...]

    def result_shape(self, shape: Shape) -> Shape:
        return (sum(self.rows), *shape[1:])

    def run(self, runtime: Runtime, array: Array) -> Array:
        call = calls.allgather(ArrayOperand(array), self.name, global_process_set)
        done = calls.run_in_order(calls.detailed(call))
        if done.rows != self.rows:  # found on every rank, since all are told the same
            raise DisagreementError(
                f"{runtime.where}: allgather {self.name or done.name!r}: ranks have {done.rows} "
                f"rows; expected {self.rows}. In a compiled program all must have equally many"
            )
        gathered: Array = done.result
        return gathered

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        return apply(ReduceScatter(None, self.rows, Op.SUM), cotangent)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Collective):
    """This rank's rows of all ranks' arrays combined."""

    rows: tuple[int, ...]
    op: Op

    def result_shape(self, shape: Shape) -> Shape:
        return (self.rows[process.rank()], *shape[1:])

    def run(self, runtime: Runtime, array: Array) -> Array:
        operand, world = ArrayOperand(array), global_process_set
        call = calls.reducescatter(operand, self.name, world, self.op, 1.0, 1.0, self.rows)
        return _in_order(call)

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        whole = apply(AllGather(None, self.rows), cotangent)
        return whole / process.size() if self.op is Op.AVERAGE else whole

    @property
    def reduces_by(self) -> Op:
        return self.op


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """Block r of every rank's array, on rank r."""

    def result_shape(self, shape: Shape) -> Shape:
        return shape

    def run(self, runtime: Runtime, array: Array) -> Array:
        call = calls.alltoall(ArrayOperand(array), self.name, global_process_set, None)
        return _in_order(call)

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        return apply(AllToAll(None), cotangent)


def _in_order(call: Call[Any]) -> Array:
    """Run an operation where the program has it.

    Ranks find each other's by that order, and not by names: XLA's threads come to them, of which
    one cannot know what else they will come to, and who is in another operation shall be told.
    """
    result: Array = calls.run_in_order(call)
    return result


def _count_rows(array: jax.Array, name: str | None) -> tuple[int, ...]:
    """How many rows each rank's array has."""
    mine = ArrayOperand(np.array(array.shape[:1]))
    return tuple(_in_order(calls.allgather(mine, name, global_process_set)).tolist())


def apply(collective: Collective, array: Any) -> jax.Array:
    """Do it now, or have it done by the program that is being traced."""
    result: jax.Array = _primitive.bind(array, collective=collective)
    return result


def _now(array: Any, *, collective: Collective) -> jax.Array:
    wait_for_programs()
    result = collective.run(process.current("a collective"), np.asarray(array))
    if not array.committed:
        return jnp.asarray(result)
    # A sharding over several devices may not fit another shape; JAX says so then.
    placed: jax.Array = jax.device_put(result, array.sharding)
    return placed


def _within(collective: Collective, array: Any) -> Array:
    runtime = process.current("a collective")
    runtime.expect_other_threads()
    return collective.run(runtime, np.asarray(array))


def _as_callback(array: Any, *, collective: Collective) -> Any:
    native.wait_on_own_threads()
    if process.is_initialized():
        # XLA may run the program on a thread that has not communicated before.
        process.current("a collective").expect_other_threads()
    result = jax.ShapeDtypeStruct(collective.result_shape(array.shape), array.dtype)
    return io_callback(partial(_within, collective), result, array, ordered=True)


@cache
def _effects() -> Any:
    """What JAX keeps in order: the effects of an ordered callback."""
    return jax.make_jaxpr(lambda: io_callback(_effects, None, ordered=True))().effects


def _abstract(array: Any, *, collective: Collective) -> Any:
    return array.update(shape=collective.result_shape(array.shape)), _effects()


def _jvp(primals: Any, tangents: Any, *, collective: Collective) -> Any:
    (primal,), (tangent,) = primals, tangents
    if collective.reduces_by not in LINEAR:
        raise ValueError(
            f"{collective.reduces_by.name.title()} over ranks has no gradient; expected Average or "
            "Sum. Where none is wanted, pass jax.lax.stop_gradient(x)"
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


def _make() -> Primitive:
    primitive = Primitive("wfbp_collective")
    primitive.def_impl(_now)
    primitive.def_effectful_abstract_eval(_abstract)
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.primitive_batchers[primitive] = _batched
    lower: Callable[..., Any] = mlir.lower_fun(_as_callback, multiple_results=False)
    mlir.register_lowering(primitive, lower)
    return primitive


_primitive = _make()


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
    runtime = process.current("allreduce()")
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
    runtime = process.current("broadcast()")
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
    runtime = process.current("allgather()")
    x = _array(array)
    if x.ndim == 0:
        raise ValueError("allgather needs at least one dimension; found a scalar")
    if _alone(runtime):
        return x
    if is_compiling():
        return apply(AllGather(name, (x.shape[0],) * runtime.size), x)
    wait_for_programs()
    return apply(AllGather(name, _count_rows(x, name)), x)


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
    runtime = process.current("reducescatter()")
    x = _array(array)
    if x.ndim == 0:
        raise ValueError("reducescatter needs at least one dimension; found a scalar")
    _check_op(x, op)
    if _alone(runtime):
        return x
    return apply(ReduceScatter(name, equal_rows(x.shape[0], runtime.size), op), x)


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
    runtime = process.current("alltoall()")
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

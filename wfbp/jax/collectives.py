"""Collectives on JAX arrays, under Horovod's names, inside ``jit`` and outside, differentiable.

They are one JAX primitive, which knows how they are differentiated, batched and compiled.
"""

from __future__ import annotations

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

from wfbp.core.types import ELEMENTWISE_OPS, Op, item_bytes
from wfbp.errors import DisagreementError
from wfbp.jax import native
from wfbp.jax.native import wait_for_programs
from wfbp.runtime import process
from wfbp.runtime.api.array_collectives import ArrayOperand
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.arithmetic import equal_rows
from wfbp.runtime.collectives.coordinator import Kind
from wfbp.runtime.collectives.named_lane import Outcome
from wfbp.runtime.collectives.operands import make_operation
from wfbp.runtime.collectives.process_sets import global_process_set
from wfbp.runtime.consistency import Array, check_root
from wfbp.runtime.runtime import Runtime

Shape: TypeAlias = tuple[int, ...]

LINEAR = frozenset({None, Op.SUM, Op.AVERAGE})


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective with its arguments, the same on every rank; static in compiled programs.

    Args:
        kind: the operation.
        name: compared between ranks.
        op: how arrays combine, if they do.
        root_rank: of a broadcast.
        rows: of each rank, in an all-gather or reduce-scatter.
    """

    kind: Kind
    name: str | None = None
    op: Op | None = None
    root_rank: int | None = None
    rows: tuple[int, ...] = ()

    def result_shape(self, shape: Shape) -> Shape:
        """Shape of the result for an array of this shape."""
        if self.kind is Kind.ALLGATHER:
            return (sum(self.rows), *shape[1:])
        if self.kind is Kind.REDUCESCATTER:
            return (self.rows[process.rank()], *shape[1:])
        return shape

    def run(self, array: Array) -> Array:
        """Do it, on every rank together.

        Ranks match operations by their order, not by names: XLA's threads run them, and a rank in
        another operation shall be told.
        """
        operation = make_operation(
            self.kind,
            ArrayOperand(array),
            self.name,
            global_process_set,
            op=self.op,
            root_rank=self.root_rank,
            splits=self.rows if self.kind is Kind.REDUCESCATTER else None,
            ordered=True,
        )
        finish = operation.finish

        def checked(outcome: Outcome) -> Array:
            # Found on every rank, since all are told the same.
            if self.kind is Kind.ALLGATHER and self.rows and outcome.rows != self.rows:
                raise DisagreementError(
                    f"{process.current('allgather()').where}: allgather "
                    f"{self.name or outcome.name!r}: ranks have {outcome.rows} rows; expected "
                    f"{self.rows}. In a compiled program all must have equally many"
                )
            result: Array = finish(outcome)
            return result

        operation.finish = checked
        done: Array = api.current(f"{self.kind.value}()").run([operation], is_group=False)
        return done

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        """The cotangent of the argument, from that of the result: again a collective.

        Gradients are those of the sum of what all ranks differentiate.
        """
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
    """Do it now, or have it done by the program that is being traced."""
    result: jax.Array = _primitive.bind(array, collective=collective)
    return result


def _now(array: Any, *, collective: Collective) -> jax.Array:
    wait_for_programs()
    result = collective.run(np.asarray(array))
    if not array.committed:
        return jnp.asarray(result)
    # A sharding over several devices may not fit another shape; JAX says so then.
    placed: jax.Array = jax.device_put(result, array.sharding)
    return placed


def _within(collective: Collective, array: Any) -> Array:
    runtime = process.current("a collective")
    runtime.expect_other_threads()
    return collective.run(np.asarray(array))


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
    if collective.op not in LINEAR:
        raise ValueError(
            f"{collective.op.name.title()} over ranks has no gradient; expected Average or Sum. "  # type: ignore[union-attr]
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
    x = jnp.asarray(array)
    _check_op(x, op)
    return x if _alone(runtime) else apply(Collective(Kind.ALLREDUCE, name, op), x)


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
    x = jnp.asarray(array)
    check_root(runtime, root_rank)
    return x if _alone(runtime) else apply(Collective(Kind.BROADCAST, name, root_rank=root_rank), x)


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
    x = jnp.asarray(array)
    if x.ndim == 0:
        raise ValueError("reducescatter needs at least one dimension; found a scalar")
    _check_op(x, op)
    if _alone(runtime):
        return x
    rows = equal_rows(x.shape[0], runtime.size)
    return apply(Collective(Kind.REDUCESCATTER, name, op, rows=rows), x)


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
    item_bytes(array.dtype.name)
    if op not in ELEMENTWISE_OPS:
        raise ValueError(f"op is {op!r}; expected one of {', '.join(map(str, ELEMENTWISE_OPS))}")


def is_compiling() -> bool:
    """Whether the program is traced for later, so that no other rank need be tracing it now.

    Not so in ``grad`` and ``vmap`` alone: they compute at once.
    """
    return isinstance(jnp.zeros(()), jax.core.Tracer)

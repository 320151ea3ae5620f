"""Collectives as one JAX primitive: it knows how they are differentiated, mapped and compiled.

What is to be done is a :class:`Collective`, a frozen object of which there is a class for each
kind. Outside ``jit`` it is done at once; inside, by a callback in the compiled program. Ordered
callbacks run in the program's order, within one compiled function and from one to the next, so
all ranks do the same in the same order.
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

from wfbp.core.types import Op
from wfbp.jax import native
from wfbp.jax.ordering import wait_for_programs
from wfbp.runtime import row_collectives, world
from wfbp.runtime.api import array_collectives
from wfbp.runtime.matching import Array
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
        return array_collectives.allreduce(array, self.name, self.op)

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
        return array_collectives.broadcast(array, self.root_rank, self.name)

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        total = apply(AllReduce(None, Op.SUM), cotangent)
        is_root = world.rank() == self.root_rank
        return total if is_root else jnp.zeros_like(total)


@dataclass(frozen=True, slots=True)
class AllGather(Collective):
    """All ranks' rows, one after another."""

    rows: tuple[int, ...]

    def result_shape(self, shape: Shape) -> Shape:
        return (sum(self.rows), *shape[1:])

    def run(self, runtime: Runtime, array: Array) -> Array:
        return row_collectives.gather_rows(runtime, array, self.rows, self.name)

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        return apply(ReduceScatter(None, self.rows, Op.SUM), cotangent)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Collective):
    """This rank's rows of all ranks' arrays combined."""

    rows: tuple[int, ...]
    op: Op

    def result_shape(self, shape: Shape) -> Shape:
        return (self.rows[world.rank()], *shape[1:])

    def run(self, runtime: Runtime, array: Array) -> Array:
        return row_collectives.scatter_rows(runtime, array, self.rows, self.op, self.name)

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        whole = apply(AllGather(None, self.rows), cotangent)
        return whole / world.size() if self.op is Op.AVERAGE else whole

    @property
    def reduces_by(self) -> Op:
        return self.op


@dataclass(frozen=True, slots=True)
class AllToAll(Collective):
    """Block r of every rank's array, on rank r."""

    def result_shape(self, shape: Shape) -> Shape:
        return shape

    def run(self, runtime: Runtime, array: Array) -> Array:
        return row_collectives.exchange_blocks(runtime, array, self.name)

    def transposed(self, cotangent: jax.Array) -> jax.Array:
        return apply(AllToAll(None), cotangent)


def apply(collective: Collective, array: Any) -> jax.Array:
    """Do it now, or have it done by the program that is being traced."""
    result: jax.Array = _primitive.bind(array, collective=collective)
    return result


def _now(array: Any, *, collective: Collective) -> jax.Array:
    wait_for_programs()
    result = collective.run(world.current("a collective"), np.asarray(array))
    if not array.committed:
        return jnp.asarray(result)
    # A sharding over several devices may not fit another shape; JAX says so then.
    placed: jax.Array = jax.device_put(result, array.sharding)
    return placed


def _within(collective: Collective, array: Any) -> Array:
    runtime = world.current("a collective")
    runtime.expect_other_threads()
    return collective.run(runtime, np.asarray(array))


def _as_callback(array: Any, *, collective: Collective) -> Any:
    native.wait_on_own_threads()
    if world.is_initialized():
        # XLA may run the program on a thread that has not communicated before.
        world.current("a collective").expect_other_threads()
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

"""Gradients averaged over the ranks while backward computes: of a function, or by an optimizer.

In compiled programs each gradient is announced as soon as backward has computed it, and one wait
returns all of them, reduced. Both are JAX primitives, which become calls of XLA handlers.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from wfbp.config import Config
from wfbp.core.types import Op, TensorSpec
from wfbp.jax.collective_primitive import is_compiling
from wfbp.jax.gradient_exchange import ExchangeDescription, exchange_registry
from wfbp.jax.trees import is_value
from wfbp.runtime import process
from wfbp.runtime.arguments import FLOATING, Compression, ReducerOptions, wires_of
from wfbp.runtime.runtime import Runtime

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True, slots=True)
class ExchangedLeaves:
    """The exchanged leaves of trees, by index in ``places``; the others are passed on unchanged."""

    treedef: Any
    places: tuple[int, ...]
    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, trees: Sequence[Any], roots: Sequence[str], user: str) -> ExchangedLeaves:
        """The exchanged leaves: inexact, and not empty; names begin with ``roots``."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tuple(trees))
        places, specs = [], []
        for place, (path, leaf) in enumerate(pairs):
            name = roots[path[0].idx] + jax.tree_util.keystr(path[1:])
            if not (is_value(leaf) or hasattr(leaf, "__jax_array__")):
                raise TypeError(
                    f"{user}: {name} is a {type(leaf).__qualname__}, not an array. Keep such "
                    "leaves out of what is differentiated: equinox.partition(model, "
                    "equinox.is_inexact_array), or nnx.split of Flax, sets them apart"
                )
            shape, dtype = np.shape(leaf), jax.dtypes.result_type(leaf)
            if not (jax.numpy.issubdtype(dtype, np.inexact) and math.prod(shape)):
                continue
            if dtype.name not in FLOATING:
                raise ValueError(
                    f"{user}: {name} is {dtype.name}; expected one of {', '.join(FLOATING)}"
                )
            places.append(place)
            specs.append(TensorSpec(name, tuple(shape), dtype.name))
        return cls(treedef, tuple(places), tuple(specs))

    def average(self, trees: Sequence[Any], runtime: Runtime, make: Describe) -> tuple[Any, ...]:
        """Trees of the same structure with averaged leaves; every rank calls this together."""
        description = make(runtime.config, self.specs) if self.specs else None
        if description is None or runtime.size == 1:
            return tuple(trees)
        leaves = self.treedef.flatten_up_to(tuple(trees))
        averages = exchange(description, [leaves[place] for place in self.places])
        for place, value in zip(self.places, averages, strict=True):
            leaves[place] = value
        averaged: tuple[Any, ...] = self.treedef.unflatten(leaves)
        return averaged


Describe = Callable[[Config, Sequence[TensorSpec]], ExchangeDescription]


def describe(
    user: str,
    op: Op,
    schedule: str | None,
    threshold_bytes: int | None,
    name: str | None,
    compression: Compression | None,
    config: Config,
    specs: Sequence[TensorSpec],
) -> ExchangeDescription:
    """One exchange of gradients; None means the environment's setting, ``user`` is for messages."""
    schedule = config.schedule if schedule is None else schedule
    limit_bytes = config.threshold_bytes if threshold_bytes is None else threshold_bytes
    names = [] if specs is _ANY else [spec.name for spec in specs]
    wire, wires = wires_of(config.compression if compression is None else compression, names)
    options = ReducerOptions(schedule, limit_bytes, op, name=name or user, wire=wire, wires=wires)
    options.check(specs, user)
    return ExchangeDescription(tuple(specs), options)


_ANY = (TensorSpec("any", (1,), "float32"),)
"""Leaves for checking an exchange's other arguments before its leaves are known."""


def exchange(description: ExchangeDescription, gradients: Sequence[Any]) -> list[Any]:
    """The reduced gradients: by the program that is being traced, or else now."""
    registry = exchange_registry()
    given = list(gradients)
    for index, spec in enumerate(description.specs):
        if not isinstance(given[index], jax.Array):  # not narrowed before this
            given[index] = jax.numpy.asarray(given[index], jax.numpy.dtype(spec.dtype))
    compiling = is_compiling()
    if compiling:
        # A single operand each: XLA runs a call as soon as its operands exist.
        given = [
            _announce.bind(gradient, site=description, index=index)[0]
            for index, gradient in enumerate(given)
        ]
    # Transformations outside of compiled programs, such as vmap, raise.
    if compiling or any(isinstance(gradient, jax.core.Tracer) for gradient in given):
        return list(_wait.bind(*given, site=description))
    key = registry.add(description)
    return registry.programs.reduce_now(given, key, registry.reduce)


# The primitives.

_keys: WeakKeyDictionary[Any, dict[ExchangeDescription, int]] = WeakKeyDictionary()
"""The keys of each program that is being lowered, by its MLIR module."""
_keys_lock = threading.Lock()


def _key(program: Any, description: ExchangeDescription) -> int:
    """The key of a place in a program: equal descriptions are counted in the program's order."""
    with _keys_lock:
        keys = _keys.setdefault(program, {})
        if description not in keys:
            occurrence = sum(other.key == description.key for other in keys)
            numbered = replace(description, occurrence=occurrence)
            keys[description] = exchange_registry().add(numbered)
        return keys[description]


def _lowered(
    target: str, context: Any, *operands: Any, site: ExchangeDescription, index: int | None = None
) -> Any:
    """A call of an XLA handler whose results may share memory with its operands."""
    # Not its MLIR context, which JAX 0.12 gives to several programs.
    key = _key(context.module_context.module, site)
    attributes: dict[str, Any] = {"exchange": np.int64(key)}
    if index is not None:
        attributes["index"] = np.int32(index)
    aliases = {k: k for k in range(len(operands))}
    call = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return call(context, *operands, **attributes)


def _batched(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "averaged gradients cannot be mapped by vmap: each step exchanges every gradient once. "
        "Use vmap inside the loss, or on jax.grad, and average the result"
    )


def _differentiated(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "cannot differentiate averaged gradients; average what jax.grad of jax.grad gives, "
        "with wfbp.jax.allreduce or DistributedOptimizer"
    )


def _make(target: str) -> Primitive:
    primitive = Primitive(target)
    primitive.multiple_results = True
    primitive.def_impl(
        lambda *operands, **params: jax.jit(partial(primitive.bind, **params))(*operands)
    )
    primitive.def_abstract_eval(lambda *avals, **_: [a.update(weak_type=False) for a in avals])
    ad.primitive_jvps[primitive] = _differentiated
    batching.primitive_batchers[primitive] = _batched
    mlir.register_lowering(primitive, partial(_lowered, target), cacheable=False)
    return primitive


_announce = _make("wfbp_announce")
_wait = _make("wfbp_wait")
"""One primitive, so that no gradient's part of it is eliminated alone."""


def _argument_names(fun: Any, count: int) -> list[str]:
    """Names of a function's first positional arguments, for messages."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in positional]
    return names + [f"args[{k}]" for k in range(len(names), count)]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    op: Op = Op.AVERAGE,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    name: str | None = None,
    compression: Compression | None = None,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` whose gradients are averaged over all ranks.

    Under ``jax.jit`` each gradient is sent as soon as backward has computed it. The value and the
    auxiliary output are this rank's alone.

    Args:
        fun, argnums, has_aux: as in JAX.
        holomorphic: as in JAX. Gradients of complex parameters keep JAX's convention: those of a
            real loss are conjugates of PyTorch's.
        allow_int: as in JAX. Gradients of integers are not exchanged.
        op: ``Average`` or ``Sum``.
        schedule: one of ``wfbp.core.planners.ALL_REDUCE_SCHEDULES``, or ``auto``. The default is
            ``WFBP_SCHEDULE``, or ``auto`` without it.
        threshold_bytes: group size of ``threshold``. The default is ``WFBP_THRESHOLD_BYTES``, or
            25 MiB without it.
        name: for messages; exchanges that may run at once need different names.
        compression: how gradients are sent, as for :class:`wfbp.GradientReducer`.

    Returns:
        A function of the same arguments as ``fun``.

    Raises:
        TypeError: not a function, or bad ``argnums``; when gradients are computed, too few
            arguments, or a leaf is not an array.
        ValueError: a bad argument; when gradients are computed, one that cannot be sent.
        NotInitializedError: when gradients are computed before ``wfbp.init()``.

    Example:
        >>> import jax, jax.numpy as jnp, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> step = jax.jit(wfbp.value_and_grad(lambda w, x: jnp.sum(w * x)))
        >>> step(jnp.ones(2), jnp.array([1.0, 3.0]))[1]
        Array([1., 3.], dtype=float32)
    """
    user = "value_and_grad"
    both = jax.value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)
    listed = argnums if isinstance(argnums, Sequence) else (argnums,)
    numbers = tuple(map(operator.index, listed))
    make = partial(describe, user, op, schedule, threshold_bytes, name, compression)
    # Functions may be made before init(), where modules are loaded.
    make(process.current(user).config if process.is_initialized() else Config(), _ANY)

    @functools.wraps(fun, updated=())
    def averaged(*args: Any, **kwargs: Any) -> Any:
        runtime = process.current("value_and_grad()")
        if not all(-len(args) <= number < len(args) for number in numbers):
            return both(*args, **kwargs)  # JAX raises
        chosen = [range(len(args))[number] for number in numbers]
        names = _argument_names(fun, len(args))
        # Before JAX, whose error would not name a bad leaf.
        leaves = ExchangedLeaves.of([args[k] for k in chosen], [names[k] for k in chosen], user)
        value, grads = both(*args, **kwargs)
        if isinstance(argnums, Sequence):
            return value, leaves.average(grads, runtime, make)
        return value, leaves.average([grads], runtime, make)[0]

    return averaged


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    op: Op = Op.AVERAGE,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    name: str | None = None,
    compression: Compression | None = None,
) -> Callable[..., Any]:
    """``jax.grad`` whose gradients are averaged over all ranks; see :func:`value_and_grad`.

    Example:
        >>> import jax, jax.numpy as jnp, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> jax.jit(wfbp.grad(lambda w: jnp.sum(w**2)))(jnp.array([1.0, 2.0]))
        Array([2., 4.], dtype=float32)
    """
    both = value_and_grad(
        fun,
        argnums,
        has_aux,
        holomorphic,
        allow_int,
        op=op,
        schedule=schedule,
        threshold_bytes=threshold_bytes,
        name=name,
        compression=compression,
    )

    @functools.wraps(fun, updated=())
    def averaged(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return averaged


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: optax.GradientTransformation,
    *,
    op: Op = Op.AVERAGE,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    name: str | None = None,
    compression: Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax transformation so that it gets gradients averaged over all ranks.

    ``update`` announces every gradient and waits once for all. If one compiled program contains
    ``update`` and ``jax.grad``, it sends each gradient as soon as backward has computed it. Use
    either this or :func:`wfbp.jax.value_and_grad`: together they exchange gradients twice, and
    ``Sum`` is applied twice.

    Args:
        optimizer: any optax transformation.
        op, schedule, threshold_bytes, name, compression: as in :func:`value_and_grad`.

    Returns:
        A transformation with the same state.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: not an optax transformation; when updates are computed, a gradient is not an
            array.
        ValueError: a bad argument; when updates are computed, a gradient that cannot be sent.

    Example:
        >>> import jax.numpy as jnp, optax, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> optimizer = wfbp.DistributedOptimizer(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = optimizer.update({"w": jnp.ones(2)}, optimizer.init(params))
        >>> updates["w"]
        Array([-0.5, -0.5], dtype=float32)
    """
    import optax

    runtime = process.current("DistributedOptimizer()")
    if not isinstance(optimizer, optax.GradientTransformation):
        remedy = "; call it first, as in optax.sgd(0.1)" if callable(optimizer) else ""
        if hasattr(optimizer, "gradient_transformation"):
            remedy = "; pass its .gradient_transformation()"
        raise TypeError(
            f"expected an optax.GradientTransformation, found {type(optimizer).__qualname__}"
            f"{remedy}"
        )
    inner = optax.with_extra_args_support(optimizer)
    make = partial(
        describe, "DistributedOptimizer", op, schedule, threshold_bytes, name, compression
    )
    make(runtime.config, _ANY)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        runtime = process.current("DistributedOptimizer.update()")
        leaves = ExchangedLeaves.of([updates], ["gradients"], "DistributedOptimizer")
        (updates,) = leaves.average([updates], runtime, make)
        result: tuple[optax.Updates, optax.OptState] = inner.update(
            updates, state, params, **extra_args
        )
        return result

    return optax.GradientTransformationExtraArgs(inner.init, update)


# Programs traced on one rank exchange nothing, and the next runtime may have more.
process.before_end(lambda runtime: jax.clear_caches() if runtime.size == 1 else None)

"""Gradients averaged over the ranks while backward computes: of a function, or by an optimizer.

Each gradient is announced when it exists; one wait returns all of them, reduced. In compiled
programs both are JAX primitives.
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
from wfbp.jax.collectives import is_compiling
from wfbp.jax.exchanges import ExchangeDescription, exchange_registry
from wfbp.jax.trees import is_value
from wfbp.runtime import process
from wfbp.runtime.arguments import FLOATING, ReducerOptions

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True, slots=True)
class Layout:
    """The exchanged leaves of trees, by index in ``places``; the others are passed on unchanged."""

    treedef: Any
    places: tuple[int, ...]
    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, trees: Sequence[Any], roots: Sequence[str], user: str) -> Layout:
        """The exchanged leaves: floating point, and not empty; names begin with ``roots``."""
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

    def replace(
        self, trees: Sequence[Any], change: Callable[[list[Any]], list[Any]]
    ) -> tuple[Any, ...]:
        """Trees of the same structure, with the exchanged leaves replaced by ``change``."""
        leaves = self.treedef.flatten_up_to(tuple(trees))
        changed = change([leaves[place] for place in self.places])
        for place, value in zip(self.places, changed, strict=True):
            leaves[place] = value
        replaced: tuple[Any, ...] = self.treedef.unflatten(leaves)
        return replaced


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """How to exchange gradients; None means the environment's setting. ``user`` is for messages."""

    user: str
    op: Op
    schedule: str | None
    threshold_bytes: int | None
    name: str | None

    def describe(self, config: Config, specs: Sequence[TensorSpec]) -> ExchangeDescription:
        schedule = config.schedule if self.schedule is None else self.schedule
        limit_bytes = (
            config.threshold_bytes if self.threshold_bytes is None else self.threshold_bytes
        )
        ReducerOptions(schedule, limit_bytes, self.op).check(specs, self.user)
        return ExchangeDescription(
            self.name or self.user, tuple(specs), self.op, schedule, limit_bytes
        )

    def check(self, config: Config) -> None:
        """Raise ``ValueError`` for an argument that is bad for any leaves."""
        self.describe(config, [TensorSpec("any", (1,), "float32")])


@dataclass(frozen=True, eq=False)
class Site:
    """One place in a program that exchanges gradients; other sites may have equal descriptions."""

    description: ExchangeDescription
    add: Callable[[ExchangeDescription], int]


def announce(gradient: Any, site: Site, index: int) -> Any:
    """Send a gradient as soon as it exists; the result must be passed to :func:`wait`."""
    # A single operand: XLA runs a call as soon as its operands exist.
    (announced,) = _announce.bind(gradient, site=site, index=index)
    return announced


def wait(gradients: Sequence[Any], site: Site) -> list[Any]:
    """All gradients of a site, reduced; one primitive, so that none is eliminated alone."""
    reduced: list[Any] = _wait.bind(*gradients, site=site)
    return reduced


_sites: WeakKeyDictionary[Any, dict[Site, int]] = WeakKeyDictionary()
"""The keys of each program that is being lowered, by its MLIR context."""
_sites_lock = threading.Lock()


def _key(program: Any, site: Site) -> int:
    with _sites_lock:
        keys = _sites.setdefault(program, {})
        if site not in keys:
            occurrence = sum(other.description == site.description for other in keys)
            keys[site] = site.add(replace(site.description, occurrence=occurrence))
        return keys[site]


def _lowered(
    target: str, context: Any, *operands: Any, site: Site, index: int | None = None
) -> Any:
    """A call of an XLA handler whose results may share memory with its operands."""
    attributes: dict[str, Any] = {"exchange": np.int64(_key(context.module_context.context, site))}
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

    def by_itself(*operands: Any, **parameters: Any) -> Any:
        return jax.jit(partial(primitive.bind, **parameters))(*operands)

    primitive.def_impl(by_itself)
    primitive.def_abstract_eval(lambda *avals, **_: [a.update(weak_type=False) for a in avals])
    ad.primitive_jvps[primitive] = _differentiated
    batching.primitive_batchers[primitive] = _batched
    mlir.register_lowering(primitive, partial(_lowered, target), cacheable=False)
    return primitive


_announce = _make("wfbp_announce")
_wait = _make("wfbp_wait")


class TracedExchange:
    """One exchange in a program's text: announces every leaf once, then waits for all once.

    In traced programs both become calls of XLA handlers; otherwise the wait sends the gradients.
    """

    def __init__(self, description: ExchangeDescription, traced: bool) -> None:
        self._exchanges = exchange_registry()
        self._description = description
        self._site = Site(description, self._exchanges.add)
        self._traced = traced
        self._announced: set[int] = set()

    def tap(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, with a hook that announces the gradient of each."""

        def tapped(index: int, leaf: Any) -> Any:
            @jax.custom_vjp
            def identity(value: Any) -> Any:
                return value

            identity.defvjp(
                lambda value: (value, None),
                lambda _, gradient: (self.announce(index, gradient),),
            )
            return identity(leaf)

        return [tapped(index, leaf) for index, leaf in enumerate(leaves)]

    def announce(self, index: int, gradient: Any) -> Any:
        """Announce a gradient; the result must be passed to :meth:`wait`."""
        if not (self._traced or isinstance(gradient, jax.core.Tracer)):
            return gradient
        self._announced.add(index)
        return announce(self._typed(index, gradient), self._site, index)

    def wait(self, gradients: Sequence[Any]) -> list[Any]:
        """The reduced gradients; announces those that no hook has announced."""
        given = [
            self._typed(k, gradient if k in self._announced else self.announce(k, gradient))
            for k, gradient in enumerate(gradients)
        ]
        if self._traced or any(isinstance(gradient, jax.core.Tracer) for gradient in given):
            return wait(given, self._site)
        key = self._exchanges.add(self._description)
        if self._exchanges.device is not None:
            call = jax.ffi.ffi_call(
                "wfbp_wait",
                [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in given],
                input_output_aliases={k: k for k in range(len(given))},
            )
            return list(call(*given, exchange=np.int64(key)))
        arrays = [np.asarray(gradient, order="C") for gradient in given]
        results = [np.empty_like(array) for array in arrays]
        addresses = [[a.__array_interface__["data"][0] for a in each] for each in (arrays, results)]
        self._exchanges.reduce(key, *addresses)
        return [jax.numpy.asarray(result) for result in results]

    def _typed(self, index: int, gradient: Any) -> Any:
        """The gradient as a JAX array; numbers and NumPy arrays are not narrowed before this."""
        if isinstance(gradient, jax.Array):
            return gradient
        dtype = jax.numpy.dtype(self._description.specs[index].dtype)
        return jax.numpy.asarray(gradient, dtype)


class _DifferentiatedCall:
    """One call of a differentiated function; ``numbers`` are its differentiated arguments."""

    def __init__(
        self, fun: Callable[..., Any], numbers: Sequence[int], options: ExchangeOptions
    ) -> None:
        self._fun = fun
        self._numbers = numbers
        self._options = options
        self._runtime = process.current("value_and_grad()")
        # Before differentiation, which traces the function, too.
        self._traced = is_compiling()
        self._step: TracedExchange | None = None

    def lay_out(self, args: Sequence[Any]) -> list[Any]:
        """The parameters among the arguments; raises for leaves that cannot be exchanged."""
        try:
            parameters = list(inspect.signature(self._fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in parameters if p.kind in positional]
        names += [f"args[{k}]" for k in range(len(names), len(args))]
        chosen = [range(len(args))[number] for number in self._numbers]
        values = [args[k] for k in chosen]
        self._layout = Layout.of(values, [names[k] for k in chosen], self._options.user)
        return values

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with hooked parameters; JAX has checked the argument count."""
        values = self.lay_out(args)
        if self._layout.specs:
            description = self._options.describe(self._runtime.config, self._layout.specs)
            if self._runtime.size > 1:
                self._step = TracedExchange(description, self._traced)
                values = list(self._layout.replace(values, self._step.tap))
        given = list(args)
        for number, value in zip(self._numbers, values, strict=True):
            given[number] = value
        return self._fun(*given, **kwargs)

    def collect(self, grads: Any, single: bool) -> Any:
        """The reduced gradients; ``single`` if they are of one argument instead of a sequence."""
        if self._step is None:
            return grads
        reduced = self._layout.replace((grads,) if single else grads, self._step.wait)
        return reduced[0] if single else reduced


def argument_numbers(fun: Any, argnums: Any, user: str) -> tuple[int, ...]:
    """The numbers in ``argnums``; ``TypeError`` for bad ones, which JAX would report only later."""
    if not callable(fun):
        raise TypeError(
            f"{user}: expected a function, found a {type(fun).__qualname__}; pass the loss itself, "
            "and call what is returned"
        )
    try:
        listed = argnums if isinstance(argnums, Sequence) else (argnums,)
        numbers = tuple(map(operator.index, listed))
    except TypeError:
        raise TypeError(
            f"{user}: argnums is {argnums!r}; expected a whole number, or a sequence of them"
        ) from None
    try:
        # A wrapper may take other arguments than the function that it wraps.
        parameters = inspect.signature(fun, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return numbers
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return numbers
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if not all(-count <= number < count for number in numbers):
        raise TypeError(
            f"{user}: argnums is {argnums!r}, but the function has {count} positional "
            f"argument{'s' * (count != 1)}"
        )
    return numbers


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
) -> Callable[..., Any]:
    """``jax.value_and_grad`` whose gradients are averaged over all ranks.

    Under ``jax.jit`` each gradient is sent as soon as backward has computed it. The value and the
    auxiliary output are this rank's alone.

    Args:
        fun, argnums, has_aux: as in JAX.
        holomorphic: as in JAX. Complex gradients cannot be exchanged.
        allow_int: as in JAX. Gradients of integers are not exchanged.
        op: ``Average`` or ``Sum``.
        schedule: ``auto``, ``oasr``, ``mgwfbp``, ``layerwise``, ``single`` or ``threshold``. The
            default is ``WFBP_SCHEDULE``, or ``auto`` without it.
        threshold_bytes: group size of ``threshold``. The default is ``WFBP_THRESHOLD_BYTES``, or
            25 MiB without it.
        name: for messages; exchanges that may run at once need different names.

    Returns:
        A function of the same arguments as ``fun``.

    Raises:
        TypeError: not a function, or it lacks an argument of ``argnums``; when gradients are
            computed, a leaf is not an array.
        ValueError: a bad argument; when gradients are computed, one that cannot be sent.
        NotInitializedError: when gradients are computed before ``wfbp.init()``.

    Example:
        >>> import jax, jax.numpy as jnp, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> step = jax.jit(wfbp.value_and_grad(lambda w, x: jnp.sum(w * x)))
        >>> step(jnp.ones(2), jnp.array([1.0, 3.0]))[1]
        Array([1., 3.], dtype=float32)
    """
    numbers = argument_numbers(fun, argnums, "value_and_grad")
    exchange_options = ExchangeOptions("value_and_grad", op, schedule, threshold_bytes, name)
    # Functions may be made before init(), where modules are loaded.
    known = process.current("value_and_grad()").config if process.is_initialized() else Config()
    exchange_options.check(known)
    options: dict[str, Any] = {
        "argnums": argnums,
        "has_aux": has_aux,
        "holomorphic": holomorphic,
        "allow_int": allow_int,
    }

    @functools.wraps(fun, updated=())
    def averaged(*args: Any, **kwargs: Any) -> Any:
        taps = _DifferentiatedCall(fun, numbers, exchange_options)
        # JAX's error would not name the bad leaf. It reports too few arguments itself.
        if all(-len(args) <= number < len(args) for number in numbers):
            taps.lay_out(args)
        value, grads = jax.value_and_grad(taps.apply, **options)(*args, **kwargs)
        return value, taps.collect(grads, single=not isinstance(argnums, Sequence))

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
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax transformation so that it gets gradients averaged over all ranks.

    ``update`` announces every gradient and waits once for all. If one compiled program contains
    ``update`` and ``jax.grad``, it sends each gradient as soon as backward has computed it. Use
    either this or :func:`wfbp.jax.value_and_grad`: together they exchange gradients twice, and
    ``Sum`` is applied twice.

    Args:
        optimizer: any optax transformation.
        op, schedule, threshold_bytes, name: as in :func:`value_and_grad`.

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
    options = ExchangeOptions("DistributedOptimizer", op, schedule, threshold_bytes, name)
    options.check(runtime.config)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        runtime = process.current("DistributedOptimizer.update()")
        layout = Layout.of([updates], ["gradients"], options.user)
        if layout.specs:
            description = options.describe(runtime.config, layout.specs)
            if runtime.size > 1:
                exchange = TracedExchange(description, is_compiling())
                (updates,) = layout.replace([updates], exchange.wait)
        result: tuple[optax.Updates, optax.OptState] = inner.update(
            updates, state, params, **extra_args
        )
        return result

    return optax.GradientTransformationExtraArgs(inner.init, update)

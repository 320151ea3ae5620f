"""value_and_grad and grad, averaged over the ranks while backward computes."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from wfbp.config import Config
from wfbp.core.types import Op
from wfbp.jax.collectives import is_compiling
from wfbp.jax.gradient_hooks import TracedExchange
from wfbp.jax.gradient_sync import ExchangeOptions
from wfbp.jax.trees import Layout
from wfbp.runtime import process
from wfbp.runtime.runtime import Runtime


def argument_numbers(fun: Any, argnums: Any, user: str) -> tuple[int, ...]:
    """The numbers of the arguments to differentiate by.

    ``argnums`` is as in JAX; negative ones count from the end. Raises ``TypeError`` for no
    function, no numbers, or an argument that the function does not have, which JAX would report
    only when gradients are computed.
    """
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
    count = _num_positional(fun)
    if count is not None and not all(-count <= number < count for number in numbers):
        raise TypeError(
            f"{user}: argnums is {argnums!r}, but the function has {count} positional "
            f"argument{'s' * (count != 1)}"
        )
    return numbers


def argument_names(fun: Callable[..., Any], count: int) -> list[str]:
    """What a function calls its first positional arguments."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[k] if k < len(names) else f"args[{k}]" for k in range(count)]


def _num_positional(fun: Callable[..., Any]) -> int | None:
    """How many positional arguments a function takes; None where any number, or unknown."""
    try:
        # What wraps another function may take other arguments than that.
        parameters = inspect.signature(fun, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


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

    Under ``jax.jit`` each gradient leaves as soon as backward has computed it, while the rest of
    backward goes on. The value, and what ``has_aux`` adds, are this rank's own.

    Args:
        fun: as in JAX; returns a scalar, or a pair where ``has_aux``.
        argnums: as in JAX: which arguments to differentiate by.
        has_aux: as in JAX.
        holomorphic: as in JAX; gradients are complex then, which cannot be exchanged.
        allow_int: as in JAX; gradients of integers are passed on as they are.
        op: ``Average`` or ``Sum``.
        schedule: how gradients are grouped: ``auto``, ``oasr``, ``mgwfbp``, ``wfbp``, ``single``
            or ``threshold``; by default what ``WFBP_SCHEDULE`` says, or ``auto``.
        threshold_bytes: group size of ``threshold``; by default ``WFBP_THRESHOLD_BYTES`` or 25 MiB.
        name: for messages; different names keep apart what may run at once.

    Returns:
        A function of the same arguments as ``fun``.

    Raises:
        TypeError: not a function, or ``argnums`` that it does not have; when gradients are
            computed, leaves that are no arrays.
        ValueError: a bad argument; when gradients are computed, ones that cannot be sent.
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
        runtime = process.current("value_and_grad()")
        taps = _DifferentiatedCall(fun, numbers, exchange_options, runtime)
        taps.look_at(args)
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


class _DifferentiatedCall:
    """The taps of one call of a differentiated function; ``numbers`` are of its differentiated
    arguments."""

    def __init__(
        self,
        fun: Callable[..., Any],
        numbers: Sequence[int],
        options: ExchangeOptions,
        runtime: Runtime,
    ) -> None:
        self._fun = fun
        self._numbers = numbers
        self._options = options
        self._runtime = runtime
        self._traced = is_compiling()
        self._step: TracedExchange | None = None

    def look_at(self, args: Sequence[Any]) -> None:
        """Raise for leaves that cannot be differentiated by, before JAX does without their names;
        too few arguments are left to JAX."""
        if all(-len(args) <= number < len(args) for number in self._numbers):
            self._lay_out(args)

    def _lay_out(self, args: Sequence[Any]) -> list[Any]:
        names = argument_names(self._fun, len(args))
        parameters = [args[number] for number in self._numbers]
        roots = [names[number] for number in self._numbers]
        self._layout = Layout.of(parameters, roots, self._options.user)
        return parameters

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """The function, its parameters tapped; JAX has checked the number of arguments by now."""
        parameters = self._lay_out(args)
        if self._layout.specs:
            description = self._options.describe(self._runtime, self._layout)
            if self._runtime.size > 1:
                self._step = TracedExchange(description, self._traced)
                parameters = list(self._layout.replace(parameters, self._step.tap))
        given = list(args)
        for number, parameter in zip(self._numbers, parameters, strict=True):
            given[number] = parameter
        return self._fun(*given, **kwargs)

    def collect(self, grads: Any, single: bool) -> Any:
        """The gradients, reduced; ``single``: of one argument, and not of a sequence of them."""
        if self._step is None:
            return grads
        reduced = self._layout.replace((grads,) if single else grads, self._step.wait)
        return reduced[0] if single else reduced

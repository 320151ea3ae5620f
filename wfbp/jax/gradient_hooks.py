"""Where gradients leave a program, compiled or not, and where they come back.

Announcements and waits are JAX primitives; a leaf's hook announces its gradient in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from wfbp.jax.gradient_sync import ExchangeDescription, exchange_registry


@dataclass(frozen=True, eq=False)
class Site:
    """One place in a program's text at which gradients are exchanged.

    ``description`` may be equal to that of other sites; ``add`` registers it and returns its key.
    """

    description: ExchangeDescription
    add: Callable[[ExchangeDescription], int]


def announce(gradient: Any, site: Site, index: int) -> Any:
    """A gradient leaves as soon as it exists; the result must go into :func:`wait`.

    XLA runs a call as soon as its operands exist: this one has a single operand.
    """
    (announced,) = _announce.bind(gradient, site=site, index=index)
    return announced


def wait(gradients: Sequence[Any], site: Site) -> list[Any]:
    """All gradients of a site, reduced. None of them can be dropped on its own."""
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
    """A call of an XLA handler whose results may lie where its operands did."""
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
    """One exchange in a program's text: every leaf is announced once, then all are waited for once.

    While a program is traced, both become calls of XLA handlers (the primitives above). Outside of
    programs the gradients leave at once. Whether a program is ``traced`` must be found out before
    the function is differentiated, because that is a trace of its own.
    """

    def __init__(self, description: ExchangeDescription, traced: bool) -> None:
        self._exchanges = exchange_registry()
        self._description = description
        self._site = Site(description, self._exchanges.add)
        self._traced = traced
        self._announced: set[int] = set()

    def tap(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves; the gradient of each is announced as soon as it exists."""
        return [self._tap(index, leaf) for index, leaf in enumerate(leaves)]

    def _tap(self, index: int, leaf: Any) -> Any:
        @jax.custom_vjp
        def identity(value: Any) -> Any:
            return value

        identity.defvjp(
            lambda value: (value, None),
            lambda _, gradient: (self.announce(index, gradient),),
        )
        return identity(leaf)

    def announce(self, index: int, gradient: Any) -> Any:
        """Let a gradient leave; the result must go into :meth:`wait`."""
        self._announced.add(index)
        if self._is_traced(gradient):
            return announce(self._typed(index, gradient), self._site, index)
        if self._exchanges.device is not None:
            return gradient  # it leaves with the wait, which is a small program of its own
        # Of the type that was agreed upon: outside of programs JAX has not yet narrowed a number
        # or an array of NumPy.
        array = np.asarray(gradient, self._dtype(index), order="C")
        key = self._exchanges.add(self._description)
        self._exchanges.announce(key, index, array.__array_interface__["data"][0], array)
        return gradient

    def wait(self, gradients: Sequence[Any]) -> list[Any]:
        """The reduced gradients; those that no tap has announced are announced now."""
        given = [
            gradient if index in self._announced else self.announce(index, gradient)
            for index, gradient in enumerate(gradients)
        ]
        if any(self._is_traced(gradient) for gradient in given):
            typed = [self._typed(index, gradient) for index, gradient in enumerate(given)]
            return wait(typed, self._site)
        key, specs = self._exchanges.add(self._description), self._description.specs
        if self._exchanges.device is not None:
            typed = [self._typed(index, gradient) for index, gradient in enumerate(given)]
            return _wait_on_device(typed, key)
        arrays = [np.empty(spec.shape, self._dtype(k)) for k, spec in enumerate(specs)]
        targets = [array.__array_interface__["data"][0] for array in arrays]
        self._exchanges.reduce(key, targets)
        return [jax.numpy.asarray(array) for array in arrays]

    def _is_traced(self, value: Any) -> bool:
        return self._traced or isinstance(value, jax.core.Tracer)

    def _typed(self, index: int, gradient: Any) -> Any:
        """As an array of JAX, of the type that was agreed upon."""
        if isinstance(gradient, jax.Array):
            return gradient
        return jax.numpy.asarray(gradient, self._dtype(index))

    def _dtype(self, index: int) -> Any:
        return jax.numpy.dtype(self._description.specs[index].dtype)


def _wait_on_device(gradients: Sequence[Any], key: int) -> list[Any]:
    call = jax.ffi.ffi_call(
        "wfbp_wait",
        [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in gradients],
        input_output_aliases={k: k for k in range(len(gradients))},
    )
    return list(call(*gradients, exchange=np.int64(key)))

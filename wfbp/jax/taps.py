"""Taps: where gradients leave a program, compiled or not, and where they come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from wfbp.jax import primitives
from wfbp.jax.exchange import ExchangeKey
from wfbp.jax.exchanges import exchange_registry


class TracedExchange:
    """One exchange of gradients in a program's text: every leaf is announced once, then all are
    waited for once.

    While a program is traced, both become calls of XLA handlers (``primitives``). Outside of
    programs the gradients leave at once.

    Args:
        request: what is exchanged.
        traced: whether a program is being traced, rather than run. To be found out before the
            function is differentiated, because that is a trace of its own.
    """

    def __init__(self, request: ExchangeKey, traced: bool) -> None:
        self._exchanges = exchange_registry()
        self._request = request
        self._site = primitives.Site(request, self._exchanges.add)
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
        """Let a gradient leave; what is returned must go into :meth:`wait`."""
        self._announced.add(index)
        if self._is_traced(gradient):
            return primitives.announce(self._typed(index, gradient), self._site, index)
        if self._exchanges.device is not None:
            return gradient  # it leaves with the wait, which is a small program of its own
        # Of the type that was agreed upon: outside of programs JAX has not yet narrowed a number
        # or an array of NumPy.
        array = np.asarray(gradient, self._dtype(index), order="C")
        key = self._exchanges.add(self._request)
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
            return primitives.wait(typed, self._site)
        key, specs = self._exchanges.add(self._request), self._request.specs
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
        return jax.numpy.dtype(self._request.specs[index].dtype)


def _wait_on_device(gradients: Sequence[Any], key: int) -> list[Any]:
    call = jax.ffi.ffi_call(
        "wfbp_wait",
        [jax.ShapeDtypeStruct(gradient.shape, gradient.dtype) for gradient in gradients],
        input_output_aliases={k: k for k in range(len(gradients))},
    )
    return list(call(*gradients, exchange=np.int64(key)))

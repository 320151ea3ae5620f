"""Taps: where gradients leave a program, compiled or not, and where they come back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from wfbp.jax import native
from wfbp.jax.exchange import Request
from wfbp.jax.exchanges import Exchanges


@functools.cache
def exchanges() -> Exchanges:
    """Those of this process."""
    return Exchanges(native.load())


class Step:
    """One exchange of gradients in a program's text: every leaf is announced once, then all are
    waited for once.

    While a program is traced, both become calls of XLA handlers. ``announce`` declares no side
    effect and one operand: XLA runs it as soon as that gradient exists. All gradients pass through
    the one ``wait``, so none of them can be dropped on its own.

    Args:
        request: what is exchanged.
    """

    def __init__(self, request: Request) -> None:
        self._exchanges = exchanges()
        self._key = self._exchanges.add(request)
        self._specs = request.specs
        self._traced = isinstance(jax.lax.neg(np.float32(0)), jax.core.Tracer)
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
            return _call("wfbp_announce", [gradient], exchange=self._key, index=np.int32(index))[0]
        array = np.asarray(gradient, order="C")
        self._exchanges.announce(self._key, index, array.__array_interface__["data"][0], array)
        return gradient

    def wait(self, gradients: Sequence[Any]) -> list[Any]:
        """The reduced gradients; those that no tap has announced are announced now."""
        given = [
            gradient if index in self._announced else self.announce(index, gradient)
            for index, gradient in enumerate(gradients)
        ]
        if any(self._is_traced(gradient) for gradient in given):
            return _call("wfbp_wait", given, has_side_effect=True, exchange=self._key)
        reduced: list[Any] = self._exchanges.reduce(self._key, self._arrays)
        return reduced

    def _arrays(self, addresses: Sequence[int], nbytes: Sequence[int]) -> list[Any]:
        arrays = [np.empty(spec.shape, jax.numpy.dtype(spec.dtype)) for spec in self._specs]
        targets = [array.__array_interface__["data"][0] for array in arrays]
        native.load().copy(targets, addresses, nbytes)
        return [jax.numpy.asarray(array) for array in arrays]

    def _is_traced(self, value: Any) -> bool:
        return self._traced or isinstance(value, jax.core.Tracer)


def _call(
    target: str, operands: Sequence[Any], has_side_effect: bool = False, **attributes: Any
) -> list[Any]:
    """A call of a handler whose results may lie where its operands did."""
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)) for x in operands],
        has_side_effect=has_side_effect,
        input_output_aliases={k: k for k in range(len(operands))},
    )
    if "exchange" in attributes:
        attributes["exchange"] = np.int64(attributes["exchange"])
    return list(call(*operands, **attributes))

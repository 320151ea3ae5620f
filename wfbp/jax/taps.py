"""Taps: where gradients leave a program, compiled or not, and where they come back."""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from wfbp.jax import native
from wfbp.jax.device import programs_device
from wfbp.jax.exchange import Request
from wfbp.jax.exchanges import Exchanges


@functools.cache
def exchanges() -> Exchanges:
    """Those of this process.

    Raises:
        ImportError: there are no XLA handlers, and they cannot be compiled.
        NotImplementedError: programs run on neither a CPU nor CUDA.
    """
    device = programs_device()
    return Exchanges(native.load(), device)


class Place:
    """Where in which program an exchange is asked for.

    Made before the function is differentiated, because that is a trace of its own.
    """

    def __init__(self) -> None:
        self.traced = isinstance(jax.lax.neg(np.float32(0)), jax.core.Tracer)
        """Whether a program is being traced here, rather than run."""
        self._state = get_opaque_trace_state() if self.traced else None

    def turn(self, request: Request) -> Request:
        """The request, told apart from equal ones before it in the same program.

        These may run in any order, and not the same on all ranks.
        """
        if self._state is None:
            return request
        with _turns_lock:
            counts = next((c for state, c in _turns if state == self._state), None)
            if counts is None:
                counts = Counter()
                _turns.append((self._state, counts))
            counts[request] += 1
            return replace(request, turn=counts[request] - 1)


_turns: deque[tuple[Any, Counter[Request]]] = deque(maxlen=64)
"""Requests of the programs traced last, those that are being traced among them."""
_turns_lock = threading.Lock()


class Step:
    """One exchange of gradients in a program's text: every leaf is announced once, then all are
    waited for once.

    While a program is traced, both become calls of XLA handlers. An announcement has one operand:
    XLA runs it as soon as that gradient exists. All gradients pass through the one wait, so none of
    them can be dropped on its own. Neither declares a side effect: it would keep XLA from running
    announcements beside computation, and JAX from starting compiled programs without Python, which
    costs 20 us per leaf. What is not used is left out of the program, on every rank.

    Args:
        request: what is exchanged.
        place: where.
    """

    def __init__(self, request: Request, place: Place) -> None:
        self._exchanges = exchanges()
        self._key = self._exchanges.add(place.turn(request))
        self._specs = request.specs
        self._traced = place.traced
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
            return _announce(gradient, self._key, index)
        if self._exchanges.device is not None:
            return gradient  # it leaves with the wait, which is a small program of its own
        # Of the type that was agreed upon: outside of programs JAX has not yet narrowed a number
        # or an array of NumPy.
        array = np.asarray(gradient, jax.numpy.dtype(self._specs[index].dtype), order="C")
        self._exchanges.announce(self._key, index, array.__array_interface__["data"][0], array)
        return gradient

    def wait(self, gradients: Sequence[Any]) -> list[Any]:
        """The reduced gradients; those that no tap has announced are announced now."""
        given = [
            gradient if index in self._announced else self.announce(index, gradient)
            for index, gradient in enumerate(gradients)
        ]
        if any(self._is_traced(gradient) for gradient in given):
            return _call("wfbp_wait", given, exchange=np.int64(self._key))
        if self._exchanges.device is not None:
            on_it = [
                jax.numpy.asarray(gradient, jax.numpy.dtype(spec.dtype))
                for gradient, spec in zip(given, self._specs, strict=True)
            ]
            return _call("wfbp_wait", on_it, exchange=np.int64(self._key))
        arrays = [np.empty(spec.shape, jax.numpy.dtype(spec.dtype)) for spec in self._specs]
        targets = [array.__array_interface__["data"][0] for array in arrays]
        self._exchanges.reduce(self._key, targets)
        return [jax.numpy.asarray(array) for array in arrays]

    def _is_traced(self, value: Any) -> bool:
        return self._traced or isinstance(value, jax.core.Tracer)


def _announce(gradient: Any, key: int, index: int) -> Any:
    """The announcement in a program; it refuses what would make it come more than once."""

    def announced(gradient: Any) -> Any:
        return _call("wfbp_announce", [gradient], exchange=np.int64(key), index=np.int32(index))[0]

    @jax.custom_batching.custom_vmap
    def unbatched(gradient: Any) -> Any:
        return announced(gradient)

    @unbatched.def_vmap
    def batched(*_: Any) -> Any:
        raise NotImplementedError(
            "averaged gradients cannot be mapped by vmap: each step exchanges every gradient once. "
            "Use vmap inside the loss, or on jax.grad, and average the result"
        )

    @jax.custom_jvp
    def constant(gradient: Any) -> Any:
        return unbatched(gradient)

    @constant.defjvp
    def differentiated(*_: Any) -> Any:
        raise NotImplementedError(
            "cannot differentiate averaged gradients; average what jax.grad of jax.grad gives, "
            "with wfbp.jax.allreduce or DistributedOptimizer"
        )

    return constant(gradient)


def _call(target: str, operands: Sequence[Any], **attributes: Any) -> list[Any]:
    """A call of a handler whose results may lie where its operands did."""
    call = jax.ffi.ffi_call(
        target,
        [jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)) for x in operands],
        input_output_aliases={k: k for k in range(len(operands))},
    )
    return list(call(*operands, **attributes))

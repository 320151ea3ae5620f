"""Digests of parameters, and of averages by the interfaces for arrays and for JAX."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wfbp import GradientReducer

STEPS = 14

Gradients = Callable[[int], Sequence[npt.NDArray[np.float32]]]
"""This rank's gradients in a step."""


def digest(arrays: Iterable[Any]) -> str:
    """The same for the same bits; of tensors, and of arrays of NumPy or JAX."""
    plain = (a.detach() if isinstance(a, torch.Tensor) else a for a in arrays)
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in plain)).hexdigest()


def reduced(gradients: Gradients, **options: Any) -> str:
    """Averages after some steps, by a ``GradientReducer``."""
    reducer = GradientReducer([(str(a.shape), a) for a in gradients(0)], **options)
    for step in range(STEPS):
        for number, array in reversed(list(enumerate(gradients(step)))):
            reducer.mark_ready(number, array)
        averages = reducer.wait()
    return digest(averages)


def differentiated(gradients: Gradients, **options: Any) -> str:
    """The same by JAX: the gradient of each array's product with ones is the array."""
    import jax
    import jax.numpy as jnp

    import wfbp.jax

    def loss(params: Any, arrays: Any) -> jax.Array:
        return sum(jnp.vdot(p, a) for p, a in zip(params, arrays, strict=True))  # type: ignore

    params = [jnp.ones(a.shape) for a in gradients(0)]
    step = jax.jit(wfbp.jax.value_and_grad(loss, **options))
    for number in range(STEPS):
        _, averages = step(params, gradients(number))
    return digest(averages)

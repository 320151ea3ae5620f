"""What the JAX programs train, and how they compare."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import wfbp.jax as wfbp

Tree = Any
Loss = Callable[..., jax.Array]


def layers(*widths: int, seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Parameters of a multilayer perceptron."""
    rng = np.random.default_rng(seed)
    return {
        f"layer{k}": {
            "w": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), dtype),
            "b": jnp.zeros(b, dtype),
        }
        for k, (a, b) in enumerate(itertools.pairwise(widths))
    }


def data(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp(params: Tree, x: jax.Array) -> jax.Array:
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    return x


def mlp_loss(params: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(mlp(params, x) ** 2)


@functools.cache
def alone(loss: Loss) -> Callable[..., Tree]:
    """The compiled gradient, of this rank only."""
    return jax.jit(jax.grad(loss))


def mean_over_ranks(fun: Callable[..., Tree], batches: Callable[[int], jax.Array]) -> Tree:
    """The mean of what ``fun`` gives for every rank's batch."""
    found = [fun(batches(rank)) for rank in range(wfbp.size())]
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *found)


def difference(a: Tree, b: Tree) -> float:
    """The largest difference between two trees of the same structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b), (a, b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        (
            float(np.max(np.abs(np.asarray(u, np.float64) - np.asarray(v, np.float64)), initial=0))
            for u, v in pairs
        ),
        default=0.0,
    )


def close(found: Tree, wanted: Tree, tolerance: float = 1e-6) -> None:
    """Raise unless two trees have the same types and, about, values."""
    for u, v in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.result_type(u) == jnp.result_type(v), (u, v)
        assert np.shape(u) == np.shape(v), (u, v)
    assert difference(found, wanted) <= tolerance, (found, wanted)


def averages(
    loss: Loss, params: Tree, *shape: int, steps: int = 3, tolerance: float = 1e-6, **options: Any
) -> None:
    """Gradients of the compiled loss are the mean of all ranks', step after step."""
    step = jax.jit(wfbp.value_and_grad(loss, **options))
    for number in range(steps):

        def batch(rank: int, number: int = number) -> jax.Array:
            return data(*shape, seed=100 * number + rank)

        _, found = step(params, batch(wfbp.rank()))
        wanted = mean_over_ranks(lambda x: alone(loss)(params, x), batch)
        close(found, wanted, tolerance)

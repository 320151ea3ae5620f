"""Means over ranks of what a program reports."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from wfbp.core.types import Op
from wfbp.jax.after_programs import wait_for_programs
from wfbp.jax.collectives import Collective, allreduce, is_compiling
from wfbp.jax.trees import is_value
from wfbp.runtime import process
from wfbp.runtime.collectives.coordinator import Kind

Tree = TypeVar("Tree")


def average_metrics(metrics: Tree, name: str | None = None) -> Tree:
    """The mean over ranks of every number in a tree, in one message.

    Args:
        metrics: a pytree of numbers and arrays, of the same structure and shapes on every rank;
            inside ``jit`` or outside. Other leaves are left alone.
        name: for messages.

    Returns:
        The same tree of means: Python numbers become ``float``, arrays of integers arrays of
        floating-point numbers; other element types stay. Inside ``jit`` numbers are JAX's, and
        means are computed in single precision unless ``jax_enable_x64``: integers are exact
        up to 2**24 then.

    Raises:
        TypeError: a complex number.
        DisagreementError: ranks passed different metrics.

    Example:
        >>> import wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.average_metrics({"loss": 0.5, "correct": 3})
        {'loss': 0.5, 'correct': 3.0}
    """
    process.current("average_metrics()")
    paths, structure = jax.tree_util.tree_flatten_with_path(metrics)
    leaves = [leaf for _, leaf in paths]
    indices = [index for index, leaf in enumerate(leaves) if is_value(leaf)]
    for index in indices:
        if jnp.iscomplexobj(leaves[index]):
            what = jax.tree_util.keystr(paths[index][0]) or "the metric"
            raise TypeError(
                f"average_metrics: {what} is complex; pass its real and its imaginary part"
            )
    label = name or f"metrics {', '.join(jax.tree_util.keystr(paths[k][0]) for k in indices)}"
    if is_compiling() or any(isinstance(leaves[k], jax.core.Tracer) for k in indices):
        means = _traced([jnp.asarray(leaves[k]) for k in indices], label)
    else:
        means = _now([leaves[k] for k in indices], label)
    for index, mean in zip(indices, means, strict=True):
        leaves[index] = mean
    tree: Tree = jax.tree_util.tree_unflatten(structure, leaves)
    return tree


def _now(values: list[Any], label: str) -> list[Any]:
    arrays = [np.asarray(value, np.float64) for value in values]
    wait_for_programs()
    flat = np.concatenate([np.zeros(0), *(array.reshape(-1) for array in arrays)])
    means = _split(Collective(Kind.ALLREDUCE, label, Op.AVERAGE).run(flat), arrays)
    return [_as(value, mean) for value, mean in zip(values, means, strict=True)]


def _traced(values: list[jax.Array], label: str) -> list[Any]:
    if not values:
        return []  # as on every rank: trees are of the same structure
    flat = jnp.concatenate([value.reshape(-1).astype(_wide(value)) for value in values])
    means = _split(allreduce(flat, label, Op.AVERAGE), values)
    return [mean.astype(_floating(value)) for value, mean in zip(values, means, strict=True)]


def _split(flat: Any, arrays: list[Any]) -> list[Any]:
    ends = np.cumsum([array.size for array in arrays], dtype=int)
    return [
        flat[end - array.size : end].reshape(array.shape)
        for end, array in zip(ends, arrays, strict=True)
    ]


def _as(value: Any, mean: Any) -> Any:
    if isinstance(value, jax.Array):
        return jnp.asarray(mean, _floating(value))
    if isinstance(value, np.ndarray):
        return mean.astype(_floating(value))
    return float(mean)


def _floating(value: Any) -> Any:
    """Its element type, or that of JAX for the quotient of integers."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.dtype
    return np.dtype(np.float64) if isinstance(value, np.ndarray) else jnp.result_type(float)


def _wide(value: jax.Array) -> Any:
    return jnp.promote_types(_floating(value), jnp.float32)

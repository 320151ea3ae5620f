"""Trees of arrays that ranks share: parameters, metrics, objects.

JAX returns from a compiled function before it has run, and a running step may still exchange
gradients. So collectives wait for the programs that this thread has called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from wfbp.core.types import Op
from wfbp.jax.collective_primitive import Collective, allreduce, is_compiling
from wfbp.jax.xla_handlers import wait_for_programs
from wfbp.runtime import process
from wfbp.runtime.api.parameters import MANY, broadcast_buffers
from wfbp.runtime.collectives import api
from wfbp.runtime.consistency import (
    check_bytes,
    check_root,
    dtype_key,
    flattened,
)
from wfbp.runtime.named.coordinator import Kind

P = ParamSpec("P")
T = TypeVar("T")
Tree = TypeVar("Tree")


def _after_programs(operation: Callable[P, T]) -> Callable[P, T]:
    """The operation, run after the programs under way."""

    @functools.wraps(operation)
    def act(*args: P.args, **kwargs: P.kwargs) -> T:
        wait_for_programs()
        return operation(*args, **kwargs)

    return act


allgather_object = _after_programs(api.allgather_object)
broadcast_object = _after_programs(api.broadcast_object)
barrier = _after_programs(api.barrier)


def is_value(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def has_arrays(tree: Any) -> bool:
    if isinstance(tree, Iterator):  # JAX treats it as a leaf, and warns
        return False
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(tree))


def broadcast_parameters(parameters: Tree, root_rank: int = 0) -> Tree:
    """Return the root's tree of parameters, optimizer state or other arrays on every rank.

    JAX arrays are immutable: use the returned tree.

    Args:
        parameters: a pytree, of the same structure on every rank. Leaves that are neither arrays
            nor numbers, such as functions, are kept.
        root_rank: rank whose values are sent.

    Returns:
        The same tree with the root's values, of the same types and on the same devices.

    Raises:
        ValueError: a call within a compiled function, a leaf that cannot be sent, or ``root_rank``
            does not exist.
        PeerError: another rank raised ``ValueError``.
        DisagreementError: ranks passed different leaves, shapes or element types.

    Example:
        >>> import jax, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast_parameters({"step": 3, "w": jax.numpy.ones(2)}, root_rank=0)
        {'step': 3, 'w': Array([1., 1.], dtype=float32)}
    """
    runtime = process.current("broadcast_parameters()")
    paths, structure = jax.tree_util.tree_flatten_with_path(parameters)
    leaves = [leaf for _, leaf in paths]
    copies = {}
    rows = []
    with runtime.channel.sharing_errors(MANY):
        check_root(runtime, root_rank)
        for index, (path, leaf) in enumerate(paths):
            if not is_value(leaf):
                continue
            name = jax.tree_util.keystr(path)
            copies[index] = copy = _own_copy(name, leaf)
            rows.append((name, dtype_key(copy.dtype), copy.shape))
    wait_for_programs()
    buffers = [flattened(copy).view(np.uint8) for copy in copies.values()]
    broadcast_buffers(runtime, rows, buffers, root_rank)
    if runtime.size > 1:
        for index, copy in copies.items():
            leaves[index] = _like(leaves[index], copy)
    tree: Tree = jax.tree_util.tree_unflatten(structure, leaves)
    return tree


def _own_copy(name: str, leaf: Any) -> np.ndarray[Any, Any]:
    """A leaf's values in memory that may be overwritten."""
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(
            f"{name or 'the parameters'}: broadcast_parameters was called within a compiled "
            "function; call it before"
        )
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    copy = np.array(leaf, order="C", copy=True)
    check_bytes(name, copy)
    return copy


def _like(leaf: Any, values: np.ndarray[Any, Any]) -> Any:
    if isinstance(leaf, np.ndarray):
        return values
    if isinstance(leaf, np.generic):
        return values[()]
    if not isinstance(leaf, jax.Array):
        return values.item()
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        made = jax.random.wrap_key_data(jnp.asarray(values), impl=jax.random.key_impl(leaf))
        return jax.device_put(made, leaf.sharding) if leaf.committed else made
    return jax.device_put(values, leaf.sharding) if leaf.committed else jnp.asarray(values)


def average_metrics(metrics: Tree, name: str | None = None) -> Tree:
    """Average every number in a tree over the ranks, in one message.

    Args:
        metrics: a pytree of numbers and arrays, of the same structure and shapes on every rank;
            inside ``jit`` or outside. Other leaves are kept.
        name: for messages.

    Returns:
        The same tree of means. Python numbers become ``float``, integer arrays become
        floating-point; other element types stay. Inside ``jit`` the means are in single precision
        unless ``jax_enable_x64`` is set, so integers are exact up to 2**24.

    Raises:
        TypeError: a complex number.
        DisagreementError: ranks passed different metrics.

    Example:
        >>> import wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.average_metrics({"correct": 3, "loss": 0.5})
        {'correct': 3.0, 'loss': 0.5}
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
    traced = is_compiling() or any(isinstance(leaves[k], jax.core.Tracer) for k in indices)
    means = _means([leaves[k] for k in indices], label, traced)
    for index, mean in zip(indices, means, strict=True):
        leaves[index] = mean
    tree: Tree = jax.tree_util.tree_unflatten(structure, leaves)
    return tree


def _means(values: list[Any], label: str, traced: bool) -> list[Any]:
    if traced:
        values = [jnp.asarray(value) for value in values]
        arrays = [
            value.astype(jnp.promote_types(_floating(value), jnp.float32)) for value in values
        ]
        flat: Any = jnp.concatenate([jnp.zeros(0), *(array.reshape(-1) for array in arrays)])
        mean: Any = allreduce(flat, label, Op.AVERAGE)
    else:
        arrays = [np.asarray(value, np.float64) for value in values]
        wait_for_programs()
        flat = np.concatenate([np.zeros(0), *(array.reshape(-1) for array in arrays)])
        mean = Collective(Kind.ALLREDUCE, label, Op.AVERAGE).run(flat)
    means: list[Any] = []
    end = 0
    for value, array in zip(values, arrays, strict=True):
        start, end = end, end + array.size
        part = mean[start:end].reshape(array.shape)
        if isinstance(value, jax.Array):
            means.append(jnp.asarray(part, _floating(value)))
        elif isinstance(value, np.ndarray):
            means.append(part.astype(_floating(value)))
        else:
            means.append(float(part))
    return means


def _floating(value: Any) -> Any:
    """The value's element type; for integers, the type of their quotient."""
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.dtype
    return np.dtype(np.float64) if isinstance(value, np.ndarray) else jnp.result_type(float)

"""Every rank starts from the same parameters and the same optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from wfbp.jax.after_programs import wait_for_programs
from wfbp.jax.trees import is_value
from wfbp.runtime import process
from wfbp.runtime.api.parameters import MANY, broadcast_buffers
from wfbp.runtime.consistency import (
    check_bytes,
    check_root,
    dtype_key,
    flattened,
    sharing_argument_errors,
)

Tree = TypeVar("Tree")


def broadcast_parameters(parameters: Tree, root_rank: int = 0) -> Tree:
    """The root's parameters, on every rank; also optimizer state, or anything else of arrays.

    JAX's arrays cannot be changed: go on with what is returned.

    Args:
        parameters: a pytree, of the same structure on every rank. Leaves that are neither arrays
            nor numbers, such as functions, are left alone.
        root_rank: whose values everybody gets.

    Returns:
        The same tree with the root's values, of the same types and on the same devices.

    Raises:
        ValueError: called within a compiled function, a leaf that cannot be sent, or no such rank.
        PeerError: another rank found one of these.
        DisagreementError: ranks passed different leaves, shapes or element types.

    Example:
        >>> import jax, wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast_parameters({"w": jax.numpy.ones(2), "step": 3}, root_rank=0)
        {'w': Array([1., 1.], dtype=float32), 'step': 3}
    """
    runtime = process.current("broadcast_parameters()")
    paths, structure = jax.tree_util.tree_flatten_with_path(parameters)
    leaves = [leaf for _, leaf in paths]
    copies = {}
    rows = []
    with sharing_argument_errors(runtime, MANY):
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


def has_arrays(tree: Any) -> bool:
    """Whether a leaf of the tree is an array of JAX."""
    if isinstance(tree, Iterator):  # JAX takes it for a leaf, and warns
        return False
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(tree))


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
    """The values as the leaf is: of its type, and on its devices."""
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

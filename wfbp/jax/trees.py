"""Trees of gradients: which leaves travel, and what they are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from wfbp.core.types import TensorSpec
from wfbp.runtime.arguments import FLOATING


def is_value(leaf: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


@dataclass(frozen=True, slots=True)
class Layout:
    """The leaves of a tree that are exchanged.

    Args:
        treedef: of all trees together.
        places: indices of the exchanged leaves; the others are passed on as they are.
        specs: of the exchanged leaves.
    """

    treedef: Any
    places: tuple[int, ...]
    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, trees: Sequence[Any], roots: Sequence[str], user: str) -> Layout:
        """The leaves that trees of gradients, or of parameters, exchange together.

        Leaves without elements, or that are no floating point numbers (step counters, gradients of
        integers), are not exchanged. ``roots`` name the trees; their leaves' names begin with them.

        Raises:
            TypeError: a leaf that is neither an array nor a number.
            ValueError: a complex leaf, or one of a floating point type that cannot be sent.
        """
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tuple(trees))
        places, specs = [], []
        for place, (path, leaf) in enumerate(pairs):
            name = roots[path[0].idx] + jax.tree_util.keystr(path[1:])
            if not (is_value(leaf) or hasattr(leaf, "__jax_array__")):
                raise TypeError(
                    f"{user}: {name} is a {type(leaf).__qualname__}, not an array. Keep such "
                    "leaves out of what is differentiated: equinox.partition(model, "
                    "equinox.is_inexact_array), or nnx.split of Flax, sets them apart"
                )
            shape, dtype = np.shape(leaf), jax.dtypes.result_type(leaf)
            if not (jax.numpy.issubdtype(dtype, np.inexact) and math.prod(shape)):
                continue
            if dtype.name not in FLOATING:
                raise ValueError(
                    f"{user}: {name} is {dtype.name}; expected one of {', '.join(FLOATING)}"
                )
            places.append(place)
            specs.append(TensorSpec(name, tuple(shape), dtype.name))
        return cls(treedef, tuple(places), tuple(specs))

    def replace(
        self, trees: Sequence[Any], change: Callable[[list[Any]], list[Any]]
    ) -> tuple[Any, ...]:
        """Trees of the same structure in which ``change`` has replaced the exchanged leaves."""
        leaves = self.treedef.flatten_up_to(tuple(trees))
        changed = change([leaves[place] for place in self.places])
        for place, value in zip(self.places, changed, strict=True):
            leaves[place] = value
        replaced: tuple[Any, ...] = self.treedef.unflatten(leaves)
        return replaced

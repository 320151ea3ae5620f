"""Descriptions of tensors, which ranks compare, and checks of arrays before data moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.comm.arrays import Buffer
from wfbp.core.types import TensorSpec
from wfbp.runtime.runtime import Runtime

SAME_TENSORS = "Every rank must pass the same tensors, in the same order, with the same settings"


def describe_specs(specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Descriptions by name, which must be equal on all ranks."""
    return describe_tensors((spec.name, spec.dtype, spec.shape) for spec in specs)


def describe_tensors(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> dict[str, str]:
    """The same of names, element types, which may be none of a ``TensorSpec``, and shapes."""
    return {str(name): f"{dtype}{tuple(shape)}" for name, dtype, shape in tensors}


Array = npt.NDArray[Any]


def check_root(runtime: Runtime, root_rank: int) -> None:
    if not 0 <= root_rank < runtime.size:
        raise ValueError(f"root_rank is {root_rank}; expected 0 to {runtime.size - 1}")


def check_bytes(name: str, array: Array) -> None:
    """Raise ``ValueError`` unless an array's bytes mean the same on every rank."""
    if array.dtype.hasobject:
        raise ValueError(
            f"{name} is of type object; expected numbers. Use broadcast_object for Python objects"
        )


def check_writable(name: str, array: Any) -> None:
    """Raise unless it is an array that can be filled."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a {type(array).__qualname__}; expected a NumPy array, which can be filled "
            "in place"
        )
    check_bytes(name, array)
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only; expected an array that can be filled in place")


def in_native_order(array: Array) -> Array:
    """The array in this machine's byte order, as messages need; itself if it is already."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@lru_cache
def dtype_key(dtype: np.dtype[Any]) -> str:
    """An element type for comparison between ranks: its name, or all its fields."""
    return dtype.name if dtype.names is None else str(dtype.descr)


def flattened(array: Array) -> Buffer:
    """A contiguous array as one dimension of its storage type (uint16 for bfloat16)."""
    if dtype_key(array.dtype) == "bfloat16":
        array = array.view(np.uint16)
    return array.reshape(-1)

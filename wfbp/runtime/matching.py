"""What ranks compare before the data of an operation moves, and what can move at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.comm.backend import Buffer
from wfbp.runtime.runtime import Runtime

Array = npt.NDArray[Any]


def check_consistent(runtime: Runtime, call: str, *details: str, private: int = 0) -> list[int]:
    """Compare what the ranks are about to do.

    Args:
        runtime: of this rank.
        call: the operation, as programs call it.
        details: its name and whatever else must be equal on all ranks, as messages show it.
        private: a number that may differ.

    Returns:
        Every rank's private number.

    Raises:
        DisagreementError: on every rank, with what each of two ranks is about to do.
    """
    purpose = f"{call}({', '.join(details)})"
    label = " ".join([call, *details[:1]])
    return [int(text) for text in runtime.exchange(b"%d" % private, label, purpose)]


def describe_array(dtype: str, shape: Sequence[int]) -> str:
    """An array as messages show it."""
    return f"{dtype}{tuple(shape)}"


def check_root(runtime: Runtime, root_rank: int) -> None:
    """Raise ``ValueError`` unless the root is a rank."""
    if not 0 <= root_rank < runtime.size:
        raise ValueError(f"root_rank is {root_rank}; expected 0 to {runtime.size - 1}")


def check_bytes(name: str, array: Array) -> None:
    """Raise ``ValueError`` unless an array's bytes mean the same on every rank."""
    if array.dtype.hasobject:
        raise ValueError(
            f"{name} is of type object; expected numbers. Use broadcast_object for Python objects"
        )


def check_writable(name: str, array: Any) -> None:
    """Raise unless values can be written into what was passed.

    Raises:
        TypeError: it is no array; a copy would be written to in vain.
        ValueError: an array that is read-only, or one of Python objects.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a {type(array).__qualname__}; expected a NumPy array, which can be filled "
            "in place"
        )
    check_bytes(name, array)
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only; expected an array that can be filled in place")


def in_native_order(array: Array) -> Array:
    """The array in this machine's byte order, in which values travel; itself if it is already."""
    if array.dtype.isnative:
        return array
    return array.astype(array.dtype.newbyteorder("="))


def dtype_key(dtype: np.dtype[Any]) -> str:
    """What ranks compare of an element type: its name, or all its fields."""
    return dtype.name if dtype.names is None else str(dtype.descr)


def flattened(array: Array) -> Buffer:
    """A contiguous array as one dimension of its storage type (uint16 for bfloat16)."""
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    return array.reshape(-1)

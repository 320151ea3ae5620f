"""Arithmetic that no backend has: scaling, narrow integers, shares of rows, Adasum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp import native
from wfbp.comm.arrays import Buffer
from wfbp.core.types import ITEM_BYTES, Op

_FURTHER = {"complex64": 8, "complex128": 16, "int8": 1, "int16": 2, "bool": 1}
ITEM: dict[str, int] = ITEM_BYTES | _FURTHER
"""Bytes per element of every type that named operations carry."""

_CARRIED_AS = {"int8": "int32", "int16": "int32", "bool": "uint8"}
"""The types that stand for those that backends do not reduce; sums wrap around alike there."""


def scale(data: Buffer, dtype: str, factor: float) -> None:
    """Multiply in place: half precision in float32, integers in float64, truncated toward zero."""
    if factor == 1.0:
        return
    if data.dtype.kind == "f" or dtype in ("float16", "bfloat16"):
        native.scale(data, dtype, factor)
    else:
        with np.errstate(invalid="ignore"):  # what does not fit has no right value
            data[:] = np.trunc(data * np.float64(factor)).astype(data.dtype)


def reducible(data: Buffer, dtype: str, op: Op) -> tuple[Buffer, str, Op]:
    """A buffer that a backend can reduce instead, its type, and the operation."""
    kind = _CARRIED_AS.get(dtype)
    if kind is None:
        return data, dtype, op
    if dtype == "bool":  # true where any is, or where all are
        return data.view(np.uint8), kind, Op.MAX if op is Op.SUM else op
    return data.astype(kind), kind, op


def equal_rows(num_rows: int, size: int) -> tuple[int, ...]:
    """Rows per rank, as equal as possible, first ranks first: (3, 2, 2) for 7 rows on 3 ranks."""
    return tuple(num_rows // size + (rank < num_rows % size) for rank in range(size))


def adasum(parts: Sequence[Buffer], dtype: str) -> Buffer:
    """Combine a power of two of contributions pairwise, first ranks that differ in the lowest bit.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020), equation 3: the
    result is the sum of orthogonal gradients, and the average of parallel ones.

    >>> adasum([np.float32([1, 0]), np.float32([0, 1])], "float32")
    array([1., 1.], dtype=float32)
    """
    level = [_widened(part, dtype) for part in parts]
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return _narrowed(level[0], dtype)


def _pair(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    wide_a, wide_b = a.astype(np.float64, copy=False), b.astype(np.float64, copy=False)
    dot = float(wide_a @ wide_b)
    norm_a, norm_b = float(wide_a @ wide_a), float(wide_b @ wide_b)
    of_a = 1.0 if norm_a == 0.0 else 1.0 - dot / (2.0 * norm_a)
    of_b = 1.0 if norm_b == 0.0 else 1.0 - dot / (2.0 * norm_b)
    combined: npt.NDArray[Any] = (of_a * wide_a + of_b * wide_b).astype(a.dtype)
    return combined


def _widened(data: Buffer, dtype: str) -> npt.NDArray[Any]:
    if dtype == "float16":
        return data.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def _narrowed(values: npt.NDArray[Any], dtype: str) -> Buffer:
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":  # to nearest, ties to even; a NaN stays one
        bits = values.view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    return values

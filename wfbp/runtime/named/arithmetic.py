"""Arithmetic that no backend has: scaling, narrow integers, shares of rows."""

from __future__ import annotations

import numpy as np

from wfbp import native
from wfbp.comm.arrays import INTEGER, Buffer
from wfbp.core.types import ITEM_BYTES, Op
from wfbp.runtime.named.coordinator import Request

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


def reducible(data: Buffer, request: Request) -> tuple[Buffer, str, Op]:
    """A buffer that a backend can reduce instead, its type, and the operation."""
    dtype, op = request.dtype, Op(request.op)
    kind = _CARRIED_AS.get(dtype, dtype)
    if dtype == "bool":  # true where any is, or where all are
        return data.view(np.uint8), kind, Op.MAX if op is Op.SUM else op
    if kind in INTEGER and (request.prescale, request.postscale) != (1.0, 1.0):
        kind = "int64"  # only the scaled result has to fit
    return (data if kind == dtype else data.astype(kind)), kind, op


def equal_rows(num_rows: int, size: int) -> tuple[int, ...]:
    """Rows per rank, as equal as possible, first ranks first: (3, 2, 2) for 7 rows on 3 ranks."""
    return tuple(num_rows // size + (rank < num_rows % size) for rank in range(size))

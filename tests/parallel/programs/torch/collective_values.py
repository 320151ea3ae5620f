"""What ranks bring to collectives, and what becomes of it."""

from __future__ import annotations

import numpy as np
import torch

from wfbp.core.types import Op

TORCH_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
)
NUMPY_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8")


def values(rank: int, count: int = 7) -> list[int]:
    return [(3 * k + rank) % 5 + 1 for k in range(count)]


def combined(op: Op, size: int, integer: bool) -> list[float]:
    """What an operation makes of all ranks' values: small integers, exact in every type."""
    columns = np.array([values(r) for r in range(size)], np.float64)
    result = {
        Op.SUM: columns.sum(0),
        Op.AVERAGE: columns.sum(0) / size,
        Op.MIN: columns.min(0),
        Op.MAX: columns.max(0),
        Op.PRODUCT: columns.prod(0),
    }[op]
    return list(np.trunc(result) if integer else result)

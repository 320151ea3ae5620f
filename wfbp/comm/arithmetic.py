"""How contributions of the ranks are combined: the one definition that every backend shares.

Contributions are combined in rank order, so the result has the same bits on every rank and in
every run. NaN passes through every operation. float16 and bfloat16 are accumulated in float32
and rounded once; the average of integers is accumulated in int64, so that it cannot overflow
where its result fits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wfbp import native
from wfbp.comm.backend import Buffer
from wfbp.core.types import Op

INTEGER = frozenset({"int32", "int64", "uint8"})


def combine(shards: Sequence[Buffer], out: Buffer, dtype: str, op: Op) -> None:
    """Combine one contribution per rank, given in rank order.

    Args:
        shards: arrays of equal length as ``buffers.typed`` returns them, one per rank.
        out: where the result goes; the very memory of one of ``shards``, or none of it.
        dtype: element type of all of them.
        op: how they combine; AVERAGE divides by ``len(shards)``.

    Example:
        >>> total = np.zeros(2, np.float32)
        >>> combine([np.float32([1, 2]), np.float32([3, 6])], total, "float32", Op.AVERAGE)
        >>> total
        array([2., 4.], dtype=float32)
    """
    native.reduce_shards(shards, out, dtype, *reduction(op, len(shards)))


def reduction(op: Op, num_ranks: int) -> tuple[str, float]:
    """How so many contributions are combined: by what, and what the result is divided by.

    Example:
        >>> reduction(Op.AVERAGE, 3)
        ('sum', 3.0)
    """
    return ("sum", float(num_ranks)) if op is Op.AVERAGE else (op.value, 1.0)


def divide(data: Buffer, number: int) -> None:
    """Divide in place; by a power of two with the same bits in a third of the time.

    Example:
        >>> x = np.float32([1, 3])
        >>> divide(x, 4)
        >>> x
        array([0.25, 0.75], dtype=float32)
    """
    if number & (number - 1):
        np.divide(data, number, out=data)
    else:
        np.multiply(data, 1 / number, out=data)

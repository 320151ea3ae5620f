"""How contributions of the ranks are combined: the one definition that every backend shares.

Contributions are combined in rank order, so the result has the same bits on every rank and in
every run. NaN passes through every operation. float16 and bfloat16 are accumulated in float32
and rounded once; the average of integers is accumulated in int64, so that it cannot overflow
where its result fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.comm.buffers import HALF
from wfbp.core.types import Op

INTEGER = frozenset({"int32", "int64", "uint8"})

_BINARY: dict[Op, Callable[..., Any]] = {
    Op.SUM: np.add,
    Op.AVERAGE: np.add,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.PRODUCT: np.multiply,
}


def combine(shards: Sequence[Buffer], out: Buffer, dtype: str, op: Op) -> None:
    """Combine one contribution per rank, given in rank order.

    Args:
        shards: arrays of equal length as ``buffers.typed`` returns them, one per rank.
        out: where the result goes; may be the memory of one of ``shards``, whose others are then
            scratch memory that may be overwritten.
        dtype: element type of all of them.
        op: how they combine; AVERAGE divides by ``len(shards)``.

    Example:
        >>> total = np.zeros(2, np.float32)
        >>> combine([np.float32([1, 2]), np.float32([3, 6])], total, "float32", Op.AVERAGE)
        >>> total
        array([2., 4.], dtype=float32)
    """
    if out.size == 0:
        return
    if dtype in HALF:
        from wfbp import native

        divisor = float(len(shards)) if op is Op.AVERAGE else 1.0
        name = Op.SUM.value if op is Op.AVERAGE else op.value
        native.reduce_shards(list(shards), out, dtype, name, divisor)
        return
    if dtype in INTEGER and op is Op.AVERAGE:
        _average_integers(shards, out)
        return
    binary = _BINARY[op]
    if len(shards) == 1:
        np.copyto(out, shards[0])
        return
    late = any(np.may_share_memory(shard, out) for shard in shards[2:])
    total = shards[0] if late else out
    binary(shards[0], shards[1], out=total)
    for shard in shards[2:-1]:
        binary(total, shard, out=total)
    if len(shards) > 2:
        binary(total, shards[-1], out=out)
    if op is Op.AVERAGE:
        divide(out, len(shards))


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


def _average_integers(shards: Sequence[Buffer], out: Buffer) -> None:
    total = shards[0].astype(np.int64)
    for shard in shards[1:]:
        total += shard
    # numpy's // rounds down; the remainder of fmod has the sign of the dividend.
    total -= np.fmod(total, len(shards))
    np.copyto(out, total // len(shards), casting="unsafe")

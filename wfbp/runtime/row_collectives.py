"""Collectives that hand whole rows (of the first dimension) from rank to rank, on NumPy arrays.

Before data moves, the ranks compare what they are about to do, as in ``runtime.operations``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.core.types import Op, item_bytes
from wfbp.runtime import signals
from wfbp.runtime.arguments import labelled
from wfbp.runtime.consistency import (
    Array,
    check_bytes,
    check_consistent,
    describe_array,
    dtype_key,
    flattened,
)
from wfbp.runtime.runtime import Runtime


def equal_rows(num_rows: int, size: int) -> tuple[int, ...]:
    """Rows of each rank where they are shared out as equally as possible, first ranks first.

    >>> equal_rows(7, 3)
    (3, 2, 2)
    """
    return tuple(num_rows // size + (rank < num_rows % size) for rank in range(size))


def count_rows(
    runtime: Runtime, shape: Sequence[int], dtype: np.dtype[Any], name: str | None = None
) -> tuple[int, ...]:
    """How many rows each rank's array has; all else of their shapes must agree."""
    label = labelled("allgather", name, runtime.numbers)
    rows = f"number of rows of {describe_array(dtype_key(dtype), shape[1:])}"
    return tuple(check_consistent(runtime, "allgather", label, rows, private=shape[0]))


def gather_rows(
    runtime: Runtime, array: Array, rows: Sequence[int] | None, name: str | None = None
) -> Array:
    """The arrays of all ranks, concatenated along the first dimension in rank order.

    Args:
        runtime: of this rank.
        array: contiguous; sizes may differ between ranks in the first dimension only.
        rows: of each rank, where that is known already.
        name: for messages.

    Raises:
        ValueError: an array of Python objects.
        DisagreementError: ranks called different operations.
    """
    check_bytes("array", array)
    raw, total = gather_row_bytes(
        runtime,
        flattened(array).view(np.uint8),
        dtype_key(array.dtype),
        array.itemsize,
        array.shape,
        name,
        rows,
    )
    result: Array = raw.view(array.dtype).reshape(total, *array.shape[1:])
    return result


@signals.postponing
def gather_row_bytes(
    runtime: Runtime,
    raw: Buffer,
    dtype: str,
    itemsize: int,
    shape: Sequence[int],
    name: str | None,
    rows: Sequence[int] | None = None,
) -> tuple[Buffer, int]:
    """The bytes of all ranks' arrays in rank order, and how many rows they are.

    Args:
        runtime: of this rank.
        raw: the array's bytes.
        dtype: its element type, for comparison.
        itemsize: bytes of one element.
        shape: of the array.
        name: for messages.
        rows: of each rank, where that is known already.

    Raises:
        DisagreementError: ranks called different operations.
    """
    label = labelled("allgather", name, runtime.numbers)
    details = [label, f"rows of {describe_array(dtype, shape[1:])}"]
    if rows is not None:
        details.append(f"{', '.join(map(str, rows))} of them")
    shapes = check_consistent(runtime, "allgather", *details, private=shape[0])
    counts = [math.prod(shape[1:]) * itemsize * count for count in shapes]
    gathered = np.empty(sum(counts), np.uint8)
    start = sum(counts[: runtime.rank])
    gathered[start : start + raw.size] = raw
    runtime.call(lambda backend: backend.all_gather(gathered, counts), f"allgather of {label}")
    return gathered, sum(shapes)


@signals.postponing
def scatter_rows(
    runtime: Runtime, array: Array, rows: Sequence[int], op: Op, name: str | None = None
) -> Array:
    """This rank's rows of what all ranks' arrays combine to.

    Args:
        runtime: of this rank.
        array: same shape and element type on every rank.
        rows: of the result that each rank gets; they add up to the array's.
        op: how arrays combine.
        name: for messages.

    Raises:
        ValueError: an element type that cannot be combined.
        DisagreementError: ranks called different operations.
    """
    dtype = array.dtype.name
    row_bytes = math.prod(array.shape[1:]) * item_bytes(dtype)
    label = labelled("reducescatter", name, runtime.numbers)
    shares = f"rows={tuple(rows)}"
    check_consistent(
        runtime, "reducescatter", label, describe_array(dtype, array.shape), shares, f"op={op}"
    )
    whole = np.array(array, order="C", copy=True)
    counts = [row_bytes * count for count in rows]
    runtime.call(
        lambda backend: backend.reduce_scatter(flattened(whole), counts, dtype, op),
        f"reducescatter of {label}",
    )
    start = sum(rows[: runtime.rank])
    mine: Array = whole[start : start + rows[runtime.rank]].copy()
    return mine


@signals.postponing
def exchange_blocks(runtime: Runtime, array: Array, name: str | None = None) -> Array:
    """Block r of every rank's array, concatenated in rank order, on rank r.

    Everything is gathered on every rank: the backends pass no messages between two ranks only.

    Args:
        runtime: of this rank.
        array: same shape and element type on every rank; blocks are equal parts of its rows.
        name: for messages.

    Raises:
        ValueError: an array of Python objects.
        DisagreementError: ranks called different operations.
    """
    check_bytes("array", array)
    label = labelled("alltoall", name, runtime.numbers)
    check_consistent(
        runtime, "alltoall", label, describe_array(dtype_key(array.dtype), array.shape)
    )
    everything = np.empty((runtime.size, *array.shape), array.dtype)
    everything[runtime.rank] = array
    raw, counts = flattened(everything).view(np.uint8), [array.nbytes] * runtime.size
    runtime.call(lambda backend: backend.all_gather(raw, counts), f"alltoall of {label}")
    length = array.shape[0] // runtime.size
    mine = slice(runtime.rank * length, (runtime.rank + 1) * length)
    result: Array = everything[:, mine].reshape(array.shape)
    return result

"""Synchronous collectives on NumPy arrays, under Horovod's names.

Every rank calls the same operations in the same order. Before data moves, the ranks compare what
they are about to do, so a disagreement is an error on every rank and not a hang.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.core.types import Op, item_bytes
from wfbp.errors import DisagreementError
from wfbp.runtime import process, signals
from wfbp.runtime.arguments import labelled
from wfbp.runtime.consistency import (
    Array,
    check_argument_errors,
    check_bytes,
    check_consistent,
    check_root,
    check_writable,
    describe_array,
    dtype_key,
    flattened,
    in_native_order,
    sharing_argument_errors,
)
from wfbp.runtime.row_collectives import gather_rows
from wfbp.runtime.runtime import Runtime

MANY = "broadcast_parameters"


def allreduce(array: Any, name: str | None = None, op: Op = Op.AVERAGE) -> Array:
    """Combine an array over all ranks.

    Args:
        array: same shape and element type on every rank; float16, bfloat16 (of ml_dtypes),
            float32, float64, int32, int64 or uint8.
        name: for messages.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated to an integer.

    Returns:
        A new array; the argument is left as it is.

    Raises:
        ValueError: an element type that cannot be sent.
        DisagreementError: ranks called different operations.

    Example:
        >>> import wfbp
        >>> wfbp.init()
        >>> wfbp.allreduce(np.float32([1, 2]), op=wfbp.Sum) / wfbp.size()
        array([1., 2.], dtype=float32)
    """
    runtime = process.current("allreduce()")
    result = np.array(in_native_order(np.asarray(array)), order="C", copy=True)
    reduce_in_place(runtime, flattened(result), result.dtype.name, result.shape, op, name)
    return result


@signals.postponing
def reduce_in_place(
    runtime: Runtime,
    buffer: Buffer,
    dtype: str,
    shape: Sequence[int],
    op: Op,
    name: str | None,
) -> None:
    """Combine a flat buffer over all ranks, after comparing name, type, shape and operation."""
    item_bytes(dtype)
    if not isinstance(op, Op):
        raise ValueError(f"op is {op!r}; expected one of {', '.join(map(str, Op))}")
    label = labelled("allreduce", name, runtime.numbers)
    if runtime.size == 1:
        runtime.check()
        return
    check_consistent(runtime, "allreduce", label, describe_array(dtype, shape), f"op={op}")
    runtime.all_reduce(buffer, dtype, op, f"allreduce of {label}")


def broadcast(array: Any, root_rank: int, name: str | None = None) -> Array:
    """The root's array, on every rank.

    Args:
        array: same shape and element type on every rank.
        root_rank: whose values everybody gets.
        name: for messages.

    Returns:
        A new array.

    Raises:
        ValueError: no such rank, or an array of Python objects.
        DisagreementError: ranks called different operations.

    Example:
        >>> import wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast(np.arange(3), root_rank=0)
        array([0, 1, 2])
    """
    runtime = process.current("broadcast()")
    source = np.asarray(array)
    check_bytes("array", source)
    result = np.array(in_native_order(source), order="C", copy=True)
    broadcast_in_place(
        runtime,
        flattened(result).view(np.uint8),
        dtype_key(result.dtype),
        result.shape,
        root_rank,
        name,
    )
    return result


@signals.postponing
def broadcast_in_place(
    runtime: Runtime,
    buffer: Buffer,
    dtype: str,
    shape: Sequence[int],
    root_rank: int,
    name: str | None,
) -> None:
    """Copy the root's bytes to every rank, after comparing name, type, shape and root."""
    check_root(runtime, root_rank)
    label = labelled("broadcast", name, runtime.numbers)
    if runtime.size == 1:
        runtime.check()
        return
    check_consistent(
        runtime, "broadcast", label, describe_array(dtype, shape), f"root_rank={root_rank}"
    )
    _broadcast_one(runtime, buffer, root_rank, f"broadcast of {label}")


@signals.postponing
def broadcast_arrays(arrays: Mapping[str, Any], root_rank: int = 0) -> None:
    """Copy the root's arrays to every rank, in place.

    Args:
        arrays: by name; same names, shapes and element types on every rank.
        root_rank: whose values everybody gets.

    Raises:
        DisagreementError: ranks passed different names, shapes or element types.
        TypeError: an entry that is no array.
        ValueError: no such rank, a read-only array, or one of Python objects.
        PeerError: another rank found one of these.
    """
    runtime = process.current("broadcast_parameters()")
    rows = []
    copies = []
    with sharing_argument_errors(runtime, MANY):
        check_root(runtime, root_rank)
        for name, array in arrays.items():
            check_writable(name, array)
            rows.append((name, dtype_key(array.dtype), array.shape))
            copies.append(np.array(in_native_order(array), order="C", copy=None))
    broadcast_buffers(runtime, rows, [flattened(a).view(np.uint8) for a in copies], root_rank)
    for array, copy in zip(arrays.values(), copies, strict=True):
        if copy is not array:
            np.copyto(array, copy)


@signals.postponing
def broadcast_buffers(
    runtime: Runtime,
    rows: Sequence[tuple[str, str, Sequence[int]]],
    buffers: Sequence[Buffer],
    root_rank: int,
) -> None:
    """Copy the root's bytes of many named buffers to every rank, after comparing them all.

    Arguments must have been checked within ``sharing_argument_errors``.
    """
    if runtime.size == 1:
        runtime.check()
        return
    described = [[name, dtype, list(shape)] for name, dtype, shape in rows]
    payloads = runtime.exchange(json.dumps([root_rank, described]).encode(), MANY)
    entries = [json.loads(payload) for payload in payloads]
    check_argument_errors(runtime, MANY, entries)
    for rank, theirs in enumerate(entries):
        for first, other in zip_longest(
            _entries(entries[0]), _entries(theirs), fillvalue="no more"
        ):
            if other != first:
                raise DisagreementError(
                    f"{runtime.where}: {MANY}: ranks disagree: {first} on rank 0, {other} on rank "
                    f"{rank}. Every rank must pass the same names, shapes and types"
                )
    for (name, _, _), buffer in zip(rows, buffers, strict=True):
        _broadcast_one(runtime, buffer, root_rank, f"broadcast of {name}")


def _entries(message: Sequence[Any]) -> list[str]:
    """What a rank brought to a broadcast of many, as messages show it."""
    root_rank, rows = message
    entries = [f"{name} {describe_array(dtype, shape)}" for name, dtype, shape in rows]
    return [f"root_rank={root_rank}", *entries]


def _broadcast_one(runtime: Runtime, buffer: Buffer, root_rank: int, label: str) -> None:
    runtime.call(lambda backend: backend.broadcast(buffer, root_rank), label)


def allgather(array: Any, name: str | None = None) -> Array:
    """The arrays of all ranks, concatenated along the first dimension in rank order.

    Args:
        array: at least one dimension; sizes may differ between ranks in the first one only.
        name: for messages.

    Returns:
        A new array.

    Raises:
        ValueError: a scalar, or an array of Python objects.
        DisagreementError: ranks called different operations.

    Example:
        >>> import wfbp
        >>> wfbp.init()
        >>> len(wfbp.allgather(np.zeros((2, 3)))) == 2 * wfbp.size()
        True
    """
    runtime = process.current("allgather()")
    if np.ndim(array) == 0:
        raise ValueError("allgather needs at least one dimension; found a scalar")
    source = np.ascontiguousarray(in_native_order(np.asarray(array)))
    return gather_rows(runtime, source, None, name)


@signals.postponing
def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, in rank order; any object that can be pickled.

    Example:
        >>> import wfbp
        >>> wfbp.init()
        >>> wfbp.allgather_object("me") == ["me"] * wfbp.size()
        True
    """
    runtime = process.current("allgather_object()")
    label = labelled("allgather_object", name, runtime.numbers)
    check_consistent(runtime, "allgather_object", label)
    payloads = runtime.exchange(pickle.dumps(value), f"allgather_object {label}")
    return [pickle.loads(payload) for payload in payloads]


@signals.postponing
def broadcast_object(value: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object, on every rank; any object that can be pickled.

    Args:
        value: looked at on the root only.
        root_rank: whose object everybody gets.
        name: for messages.

    Example:
        >>> import wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    return broadcast_object_among(process.current("broadcast_object()"), value, root_rank, name)


def broadcast_object_among(
    runtime: Runtime, value: Any, root_rank: int, name: str | None = None
) -> Any:
    """As :func:`broadcast_object`, among the ranks of a runtime; the root by its number there."""
    check_root(runtime, root_rank)
    label = labelled("broadcast_object", name, runtime.numbers)
    check_consistent(runtime, "broadcast_object", label, f"root_rank={root_rank}")
    payload = pickle.dumps(value) if runtime.rank == root_rank else b""
    return pickle.loads(runtime.exchange(payload, f"broadcast_object {label}")[root_rank])


@signals.postponing
def barrier() -> None:
    """Wait until every rank has come here."""
    check_consistent(process.current("barrier()"), "barrier")

"""Broadcasts of parameters and objects; ranks compare their arguments first, so none hangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wfbp.comm.arrays import Buffer
from wfbp.runtime import process, signals
from wfbp.runtime.consistency import (
    SAME_TENSORS,
    check_root,
    check_writable,
    describe_tensors,
    dtype_key,
    flattened,
    in_native_order,
)
from wfbp.runtime.runtime import Runtime

MANY = "broadcast_parameters"


@signals.deferred
def broadcast_arrays(arrays: Mapping[str, Any], root_rank: int = 0) -> None:
    """Copy the root's arrays to every rank, in place; see ``broadcast_parameters``."""
    runtime = process.current("broadcast_parameters()")
    rows = []
    copies = []
    with runtime.channel.sharing_errors(MANY):
        check_root(runtime, root_rank)
        for name, array in arrays.items():
            check_writable(name, array)
            rows.append((name, dtype_key(array.dtype), array.shape))
            copies.append(np.array(in_native_order(array), order="C", copy=None))
    broadcast_buffers(runtime, rows, [flattened(a).view(np.uint8) for a in copies], root_rank)
    for array, copy in zip(arrays.values(), copies, strict=True):
        if copy is not array:
            np.copyto(array, copy)


@signals.deferred
def broadcast_buffers(
    runtime: Runtime,
    rows: Sequence[tuple[str, str, Sequence[int]]],
    buffers: Sequence[Buffer],
    root_rank: int,
) -> None:
    """Compare and broadcast named buffers."""
    compare_many(runtime, rows, root_rank)
    if runtime.size > 1:
        for (name, _, _), buffer in zip(rows, buffers, strict=True):
            broadcast_one(runtime, name, buffer, root_rank)


def compare_many(
    runtime: Runtime, rows: Sequence[tuple[str, str, Sequence[int]]], root_rank: int
) -> None:
    """Raise unless all ranks pass equal ``rows``."""
    same = describe_tensors(rows), {"root_rank": root_rank, "number of arrays": len(rows)}
    runtime.channel.exchange(b"", MANY, same=same, remedy=SAME_TENSORS)


def broadcast_one(runtime: Runtime, name: str, buffer: Buffer, root_rank: int) -> None:
    """Copy the root's bytes of a buffer whose name, type and shape were compared."""
    runtime.channel.call(
        lambda backend: backend.broadcast(buffer, root_rank), f"broadcast of {name}"
    )

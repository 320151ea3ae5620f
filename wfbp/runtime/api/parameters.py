"""Broadcasts of parameters and objects; ranks compare their arguments first, so none hangs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from wfbp.comm.arrays import Buffer
from wfbp.errors import DisagreementError
from wfbp.runtime import process, signals
from wfbp.runtime.consistency import (
    check_argument_errors,
    check_root,
    check_writable,
    describe_array,
    dtype_key,
    flattened,
    in_native_order,
    sharing_argument_errors,
)
from wfbp.runtime.runtime import Runtime

MANY = "broadcast_parameters"


@signals.deferring
def broadcast_arrays(arrays: Mapping[str, Any], root_rank: int = 0) -> None:
    """Copy the root's arrays to every rank, in place; see ``broadcast_parameters``."""
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


@signals.deferring
def broadcast_buffers(
    runtime: Runtime,
    rows: Sequence[tuple[str, str, Sequence[int]]],
    buffers: Sequence[Buffer],
    root_rank: int,
) -> None:
    """Compare and broadcast named buffers; call within ``sharing_argument_errors``."""
    compare_many(runtime, rows, root_rank)
    if runtime.size > 1:
        for (name, _, _), buffer in zip(rows, buffers, strict=True):
            broadcast_one(runtime, name, buffer, root_rank)


def compare_many(
    runtime: Runtime,
    rows: Sequence[tuple[str, str, Sequence[int]]],
    root_rank: int,
) -> None:
    """Raise unless all ranks pass equal ``rows``."""
    if runtime.size == 1:
        runtime.check()
        return
    described = [[name, dtype, list(shape)] for name, dtype, shape in rows]
    message = json.dumps([root_rank, described])
    payloads = runtime.channel.exchange_if_different(message.encode(), MANY)
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


def broadcast_one(runtime: Runtime, name: str, buffer: Buffer, root_rank: int) -> None:
    """Copy the root's bytes of a buffer whose name, type and shape were compared."""
    runtime.channel.call(
        lambda backend: backend.broadcast(buffer, root_rank), f"broadcast of {name}"
    )


def _entries(message: Sequence[Any]) -> list[str]:
    """One rank's arguments of a broadcast of many, for messages."""
    root_rank, rows = message
    entries = [f"{name} {describe_array(dtype, shape)}" for name, dtype, shape in rows]
    return [f"root_rank={root_rank}", *entries]

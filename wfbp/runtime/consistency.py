"""Checks that ranks are about to do the same, before data moves.

Reducers compare tensors and settings once; synchronous collectives compare their arguments each
time. A rank with a bad argument tells the others, which would wait for it otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.comm.arrays import Buffer
from wfbp.core.types import TensorSpec
from wfbp.errors import DisagreementError, PeerError
from wfbp.runtime.runtime import Runtime

_MAX_NAMED = 5


def encode_specs(specs: Sequence[TensorSpec], settings: dict[str, Any]) -> bytes:
    """A rank's tensors and settings, encoded for :func:`check_specs`."""
    return encode_arrays([(s.name, s.dtype, s.shape) for s in specs], settings)


def encode_arrays(
    arrays: Iterable[tuple[str, str, Sequence[int]]], settings: dict[str, Any]
) -> bytes:
    """The same of names, element types, which may be none of a ``TensorSpec``, and shapes."""
    rows = [[name, list(shape), dtype] for name, dtype, shape in arrays]
    return json.dumps({"tensors": rows, "settings": settings}).encode()


def check_specs(who: str, payloads: Sequence[bytes]) -> None:
    """Raise ``DisagreementError`` if a rank's encoded tensors or settings differ from rank 0's."""
    messages = [json.loads(p) for p in payloads]
    problems = []
    for rank, theirs in enumerate(messages):
        problems += _differences(messages[0], theirs, rank)
    if problems:
        shown = problems[:_MAX_NAMED]
        if len(problems) > _MAX_NAMED:
            shown.append(f"and {len(problems) - _MAX_NAMED} more")
        raise DisagreementError(
            f"{who}: ranks disagree: {'; '.join(shown)}. Every rank must pass the same tensors, "
            "in the same order, with the same settings"
        )


def _differences(ours: dict[str, Any], theirs: dict[str, Any], rank: int) -> list[str]:
    mine, others = ours["tensors"], theirs["tensors"]
    by_name = {row[0]: row for row in others}
    names = {row[0] for row in mine}
    differences = []
    for row in mine:
        match = by_name.get(row[0])
        if match is None:
            differences.append(f"{_shown(row)} of rank 0 is missing on rank {rank}")
        elif match != row:
            differences.append(f"{_shown(row)} on rank 0 is {_shown(match)} on rank {rank}")
    more = [row for row in others if row[0] not in names]
    differences += [f"{_shown(row)} of rank {rank} is missing on rank 0" for row in more]
    if not differences and mine != others:
        place = next(k for k, (a, b) in enumerate(zip(mine, others, strict=True)) if a != b)
        differences.append(
            f"tensor {place} is {_shown(mine[place])} on rank 0 and {_shown(others[place])} on "
            f"rank {rank} (the order differs)"
        )
    # Settings follow from the tensors in part, the plan from all else: report causes only.
    for key, value in ours["settings"].items():
        other = theirs["settings"].get(key)
        if differences or other == value:
            continue
        if isinstance(value, list) and isinstance(other, list):
            differences.append(
                f"{key}: {_only_in(value, other)} on rank 0 only, "
                f"{_only_in(other, value)} on rank {rank} only"
            )
        else:
            differences.append(f"{key} is {value!r} on rank 0 and {other!r} on rank {rank}")
    return differences


def _only_in(these: list[str], those: list[str]) -> str:
    names = [name for name in these if name not in set(those)]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (", ".join(names[:_MAX_NAMED]) or "none") + more


def _shown(row: list[Any]) -> str:
    name, shape, dtype = row
    return f"{name} {dtype}{tuple(shape)}"


Array = npt.NDArray[Any]


def check_consistent(runtime: Runtime, call: str, detail: str = "") -> None:
    """Raise ``DisagreementError`` unless all ranks make the same call; collective."""
    runtime.channel.exchange(b"", f"{call} {detail}".rstrip(), f"{call}({detail})")


def check_root(runtime: Runtime, root_rank: int) -> None:
    if not 0 <= root_rank < runtime.size:
        raise ValueError(f"root_rank is {root_rank}; expected 0 to {runtime.size - 1}")


def check_bytes(name: str, array: Array) -> None:
    """Raise ``ValueError`` unless an array's bytes mean the same on every rank."""
    if array.dtype.hasobject:
        raise ValueError(
            f"{name} is of type object; expected numbers. Use broadcast_object for Python objects"
        )


def check_writable(name: str, array: Any) -> None:
    """Raise unless it is an array that can be filled."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{name} is a {type(array).__qualname__}; expected a NumPy array, which can be filled "
            "in place"
        )
    check_bytes(name, array)
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only; expected an array that can be filled in place")


def in_native_order(array: Array) -> Array:
    """The array in this machine's byte order, as messages need; itself if it is already."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


@lru_cache
def dtype_key(dtype: np.dtype[Any]) -> str:
    """An element type for comparison between ranks: its name, or all its fields."""
    return dtype.name if dtype.names is None else str(dtype.descr)


def flattened(array: Array) -> Buffer:
    """A contiguous array as one dimension of its storage type (uint16 for bfloat16)."""
    if dtype_key(array.dtype) == "bfloat16":
        array = array.view(np.uint16)
    return array.reshape(-1)


_ARGUMENT_ERROR = "refused"


@contextmanager
def sharing_argument_errors(runtime: Runtime, call: str) -> Iterator[None]:
    """Context for argument checks; others learn of an error by :func:`check_argument_errors`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if runtime.size > 1:
            told = json.dumps({_ARGUMENT_ERROR: str(error)})
            runtime.channel.exchange_if_different(told.encode(), call)
        raise


def check_argument_errors(runtime: Runtime, call: str, payloads: Sequence[bytes]) -> None:
    """Raise ``PeerError`` if a rank's payload reports a bad argument instead of its arguments."""
    for rank, payload in enumerate(payloads):
        if _ARGUMENT_ERROR in (message := json.loads(payload)):
            raise PeerError(f"{runtime.where}: {call}: rank {rank}: {message[_ARGUMENT_ERROR]}")

"""The reference for ``csrc/pack.cc``, in NumPy; ``wfbp/_native.pyi`` describes each function.

The results are the same bit for bit (a NaN is a NaN, whatever its payload).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.core.types import item_bytes

INSTRUCTIONS = "numpy"

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]

CASTS = ("float32", "float64")
"""What can be packed as float16 or bfloat16."""

FLOATS = ("float16", "bfloat16", "float32", "float64")

COMBINE: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
}


class PackTable:
    """Slots of a destination and the addresses that they are filled from."""

    def __init__(
        self,
        destination: Bytes,
        offsets: Sequence[int] | npt.NDArray[np.int64],
        nbytes: Sequence[int] | npt.NDArray[np.int64],
        dtype: str,
        tensor_dtype: str = "",
    ) -> None:
        if destination.ndim != 1 or destination.dtype != np.uint8:
            raise ValueError("destination must be a one-dimensional array of uint8")
        _require_writable(destination, "destination")
        if len(offsets) != len(nbytes):
            raise ValueError(f"{len(offsets)} offsets but {len(nbytes)} sizes")
        item = item_bytes(dtype)
        self._dtype = dtype
        self._wide = tensor_dtype if tensor_dtype not in ("", dtype) else ""
        if self._wide and (self._wide not in CASTS or dtype not in ("float16", "bfloat16")):
            raise ValueError(
                f"tensors of {tensor_dtype} cannot be packed as {dtype}: only float32 and float64 "
                "can, as float16 or bfloat16"
            )
        self._ratio = item_bytes(self._wide) // item if self._wide else 1
        self._slots: list[Bytes] = []
        for i, (offset, size) in enumerate(zip(map(int, offsets), map(int, nbytes), strict=True)):
            if offset < 0 or size < 0 or offset + size > destination.size:
                raise ValueError(
                    f"slot {i} (offset {offset}, {size} bytes) is not inside the destination "
                    f"of {destination.size} bytes"
                )
            if size % item:
                raise ValueError(
                    f"slot {i} has {size} bytes: not a whole number of {dtype} elements"
                )
            self._slots.append(destination[offset : offset + size])
        self.pointers: npt.NDArray[np.int64] = np.zeros(len(self._slots), np.int64)
        # Making an array from an address costs more than a small copy, and addresses mostly stay.
        self._seen: list[tuple[int, Bytes]] = [(0, slot) for slot in self._slots]

    def pack(self) -> None:
        for slot, other in self._pairs():
            if other is None:
                slot.fill(0)
                continue
            if self._wide:
                with np.errstate(all="ignore"):
                    values = other.view(self._wide).astype(np.float32)
                    slot.view(np.uint16)[:] = _from_float(values, self._dtype)
                continue
            if other is not slot:
                np.copyto(slot, other)

    def unpack(self) -> None:
        for slot, other in self._pairs():
            if other is None or other is slot:
                continue
            if self._wide:
                other.view(self._wide)[:] = _to_float(slot.view(np.uint16), self._dtype)
            else:
                np.copyto(other, slot)

    def _pairs(self) -> Iterator[tuple[Bytes, Bytes | None]]:
        """Each slot that is not empty, with what lies at its address: itself, other, nothing."""
        for i, address in enumerate(self.pointers.tolist()):
            slot = self._slots[i]
            if slot.size == 0:
                continue
            if address == 0:
                yield slot, None
                continue
            if self._seen[i][0] != address:
                own = address == slot.ctypes.data
                self._seen[i] = (
                    address,
                    slot if own else _bytes_at(address, slot.size * self._ratio),
                )
            yield slot, self._seen[i][1]


def scale(buffer: npt.NDArray[Any], dtype: str, factor: float) -> None:
    item = item_bytes(dtype)
    _require_writable(buffer, "buffer")
    if buffer.nbytes % item:
        raise ValueError(
            f"buffer has {buffer.nbytes} bytes: not a whole number of {dtype} elements"
        )
    if factor != 1.0 and dtype not in FLOATS:
        raise ValueError(f"scale is {factor} but {dtype} can only be copied: expected 1.0")
    if factor != 1.0 and buffer.size:
        _multiply(buffer.reshape(-1).view(np.uint8), dtype, factor)


def reduce_shards(
    shards: Iterable[npt.NDArray[Any]],
    out: npt.NDArray[Any],
    dtype: str,
    op: str,
    divisor: float = 1.0,
) -> None:
    item = item_bytes(dtype)
    if op not in COMBINE:
        raise ValueError(f"op {op!r} is not one of {', '.join(COMBINE)}")
    whole = op == "sum" and 1 <= divisor <= 1e9 and divisor % 1 == 0
    if dtype not in FLOATS and divisor != 1.0 and not whole:
        raise ValueError(
            f"a {op} of {dtype} cannot be divided by {divisor}: only a sum can, by a whole number"
        )
    if out.ndim != 1 or out.itemsize != item:
        raise ValueError(f"out must be a one-dimensional array of {item}-byte elements")
    _require_writable(out, "out")
    rows = list(shards)
    if not rows:
        raise ValueError("expected at least one shard")
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.itemsize != item or row.size != out.size or not _contiguous(row):
            raise ValueError(
                f"shard {i} must be a contiguous one-dimensional array of {out.size} elements "
                f"of {item} bytes"
            )
    with np.errstate(all="ignore"):
        if dtype in ("float16", "bfloat16"):
            wide = (_to_float(row.view(np.uint16), dtype) for row in rows)
            total = _combined(wide, COMBINE[op], divisor)
            out.view(np.uint16)[:] = _from_float(total, dtype)
        elif divisor != 1.0 and dtype not in FLOATS:
            # Python's numbers do not overflow.
            sums = _combined((row.view(dtype).astype(object) for row in rows), np.add, 1.0)
            # // rounds down, but averages are truncated toward zero.
            quotients = np.sign(sums) * (abs(sums) // int(divisor))
            wrapped = (quotients + 2**63) % 2**64 - 2**63
            np.copyto(out.view(dtype), wrapped.astype(np.int64), casting="unsafe")
        else:
            rows = [row.view(dtype) for row in rows]
            rows[0] = rows[0].copy()  # what comes later may lie in ``out``
            out.view(dtype)[:] = _combined(rows, COMBINE[op], divisor)


def _combined(
    rows: Iterable[npt.NDArray[Any]], binary: Callable[..., Any], divisor: float
) -> npt.NDArray[Any]:
    """All rows in their order, in the memory of the first, then divided."""
    rest = iter(rows)
    total = next(rest)
    for row in rest:
        binary(total, row, out=total)
    if divisor != 1.0:
        np.divide(total, total.dtype.type(divisor), out=total)
    return total


def _multiply(buffer: Bytes, dtype: str, factor: float) -> None:
    with np.errstate(all="ignore"):
        if dtype in ("float16", "bfloat16"):
            halves = buffer.view(np.uint16)
            halves[:] = _from_float(_to_float(halves, dtype) * np.float32(factor), dtype)
        else:
            values = buffer.view(dtype)
            values *= values.dtype.type(factor)


def _to_float(halves: Halves, dtype: str) -> Floats:
    if dtype == "float16":
        return halves.view(np.float16).astype(np.float32)
    bits: npt.NDArray[np.uint32] = halves.astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _from_float(values: Floats, dtype: str) -> Halves:
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    # Half a unit of the last kept place, one less where that place is even: ties go to even.
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    chosen: npt.NDArray[np.uint32] = np.where(np.isnan(values), quiet, rounded)
    return chosen.astype(np.uint16)


def _bytes_at(address: int, size: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _contiguous(array: npt.NDArray[Any]) -> bool:
    return bool(array.flags.c_contiguous)


def _require_writable(array: npt.NDArray[Any], what: str) -> None:
    if not (_contiguous(array) and array.flags.writeable):
        raise ValueError(f"{what} must be a writable C-contiguous array")

"""Buffers as the backends see them: typed views of memory, and how contributions combine.

:func:`combine` is the one definition of reduction that every backend shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wfbp import native
from wfbp.comm.backend import Buffer, Segment
from wfbp.core.types import Op, item_bytes

HALF = frozenset({"float16", "bfloat16"})
"""Element types that are accumulated in float32."""

_WORDS = {name: np.dtype("uint16") for name in HALF}


def word_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type by which kernels are given elements: halves of both kinds as uint16."""
    return _WORDS.get(dtype) or np.dtype(dtype)


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds elements: their own, or uint16 for bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def typed(buffer: Buffer, dtype: str, writeable: bool = True) -> Buffer:
    """The buffer's bytes seen as elements of ``dtype`` (uint16 for the half types), not copied.

    Raises:
        ValueError: not one-dimensional, not contiguous, read-only where it must be writeable, or
            no whole number of elements.

    Example:
        >>> typed(np.zeros(8, np.uint8), "float32")
        array([0., 0.], dtype=float32)
    """
    size = item_bytes(dtype)
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(
            "a buffer must be one-dimensional and contiguous; "
            f"found shape {buffer.shape}, strides {buffer.strides}"
        )
    if writeable and not buffer.flags.writeable:
        raise ValueError("a buffer that receives must be writeable")
    if buffer.nbytes % size:
        raise ValueError(f"a buffer of {buffer.nbytes} bytes holds no whole number of {dtype}")
    words = word_dtype(dtype)
    return buffer if buffer.dtype == words else buffer.view(words)


def blocks(
    size: int, buffer: Buffer, counts: Sequence[int], dtype: str, writeable: bool = True
) -> list[Buffer]:
    """The buffer of a reduce-scatter or an all-gather as one typed block per rank.

    ``counts`` are bytes. Raises ``ValueError``, naming the size that does not fit.

    Example:
        >>> blocks(2, np.zeros(3, np.float32), [8, 4], "float32")
        [array([0., 0.], dtype=float32), array([0.], dtype=float32)]
    """
    data = typed(buffer, dtype, writeable)
    check_counts(size, data.nbytes, counts, dtype)
    item = data.itemsize
    parts = []
    end = 0
    for count in counts:
        start, end = end, end + count // item
        parts.append(data[start:end])
    return parts


def check_counts(size: int, nbytes: int, counts: Sequence[int], dtype: str) -> None:
    """Raise ``ValueError`` unless a buffer of ``nbytes`` consists of one such block per rank."""
    item = item_bytes(dtype)
    if len(counts) != size or any(count < 0 or count % item for count in counts):
        raise ValueError(
            f"{size} ranks need {size} counts of at least 0 bytes, each a whole number of "
            f"{dtype}, found {list(counts)}"
        )
    if nbytes != sum(counts):
        raise ValueError(f"the buffer is of {nbytes} bytes, but counts add up to {sum(counts)}")


class Pieces:
    """Several arrays of one element type, one after the other, sliced as if they were one.

    Example:
        >>> pieces = Pieces([np.arange(3), np.arange(3, 5)])
        >>> pieces[1:4]
        [array([1, 2]), array([3])]
    """

    def __init__(self, arrays: Sequence[Buffer]) -> None:
        self._arrays = arrays
        self.size = sum(array.size for array in arrays)
        self.nbytes = sum(array.nbytes for array in arrays)

    @classmethod
    def of(cls, buffer: Buffer, parts: Sequence[tuple[int, Buffer]]) -> Pieces:
        """A buffer in which some parts, at these starts, lie elsewhere; all of one element type."""
        if not parts:
            return cls([buffer])
        arrays = []
        end = 0
        for start, part in parts:
            arrays += [buffer[end:start], part]
            end = start + part.size
        arrays.append(buffer[end:])
        return cls([array for array in arrays if array.size])

    def __getitem__(self, wanted: slice) -> list[Buffer]:
        pieces = []
        start, stop = wanted.start, wanted.stop
        for array in self._arrays:
            if stop <= 0:
                break
            if start < array.size and stop > 0:
                piece = array[max(0, start) : stop]
                if piece.size:
                    pieces.append(piece)
            start, stop = start - array.size, stop - array.size
        return pieces


def fill(buffer: Buffer, segments: Sequence[Segment]) -> None:
    """Copy the segments of an all-reduce into its buffer, where all of it must be in one piece."""
    raw = buffer.view(np.uint8)
    for segment in segments:
        data = segment.data.view(np.uint8)
        raw[segment.start : segment.start + data.size] = data


def fill_blocks(
    buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment], dtype: str
) -> None:
    """The same for a reduce-scatter: part r of each segment into block r."""
    size = len(counts)
    whole = blocks(size, buffer.view(np.uint8), counts, "uint8")
    for segment in segments:
        parts = blocks(size, segment.data, segment.counts, dtype, writeable=False)
        for block, part in zip(whole, parts, strict=True):
            block[segment.start : segment.start + part.nbytes] = part.view(np.uint8)


INTEGER = frozenset({"int32", "int64", "uint8"})


def combine(shards: Sequence[Buffer], out: Buffer, dtype: str, op: Op) -> None:
    """Combine one contribution per rank, given in rank order; AVERAGE divides by their number.

    ``shards`` are as :func:`typed` returns them. ``out`` is one of them, or does not overlap any.

    Example:
        >>> total = np.zeros(2, np.float32)
        >>> combine([np.float32([1, 2]), np.float32([3, 6])], total, "float32", Op.AVERAGE)
        >>> total
        array([2., 4.], dtype=float32)
    """
    native.reduce_shards(shards, out, dtype, *reduction(op, len(shards)))


def reduction(op: Op, num_ranks: int) -> tuple[str, float]:
    """The operation that combines the contributions, and the divisor of its result.

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

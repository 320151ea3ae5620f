"""Memory that travels between ranks: element types, parts, and the only definition of reduction."""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wfbp.core.types import ITEM_BYTES, Op
from wfbp.native import reduce_shards

Buffer = npt.NDArray[Any]
"""A one-dimensional C-contiguous array; bfloat16 is stored as uint16."""

HALF = frozenset({"float16", "bfloat16"})
"""Element types that are accumulated in float32."""
INTEGER = frozenset({"int32", "int64", "uint8"})
_WORDS = {name: np.dtype("uint16" if name in HALF else name) for name in ITEM_BYTES}
_MAPPED_BYTES = 64 << 10
"""Buffers of at least this size are mapped from the system as separate pages."""


def word_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that kernels use for elements: uint16 for both half types."""
    return _WORDS.get(dtype) or np.dtype(dtype)


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds elements: uint16 for bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def typed(buffer: Buffer, dtype: str, writeable: bool = True) -> Buffer:
    """View the buffer's bytes as ``word_dtype(dtype)``; ``ValueError`` if it is unsuitable."""
    if (words := _WORDS.get(dtype)) is None:
        raise ValueError(f"dtype {dtype!r} cannot be sent; expected one of {', '.join(_WORDS)}")
    if buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ValueError(
            "a buffer must be one-dimensional and contiguous; "
            f"found shape {buffer.shape}, strides {buffer.strides}"
        )
    if writeable and not buffer.flags.writeable:
        raise ValueError("a buffer that receives must be writeable")
    if buffer.nbytes % words.itemsize:
        raise ValueError(f"a buffer of {buffer.nbytes} bytes holds no whole number of {dtype}")
    return buffer if buffer.dtype == words else buffer.view(words)


def blocks(
    size: int, buffer: Buffer, counts: Sequence[int], dtype: str, writeable: bool = True
) -> list[Buffer]:
    """Split a buffer into typed blocks of ``counts`` bytes, one per rank; or ``ValueError``."""
    data = typed(buffer, dtype, writeable)
    parts = []
    for start, stop in block_ranges(size, data.nbytes, counts, dtype):
        parts.append(data[start:stop])
    return parts


def block_ranges(
    size: int, nbytes: int, counts: Sequence[int], dtype: str = "uint8"
) -> list[tuple[int, int]]:
    """First and last element of each rank's block of ``counts`` bytes; ``ValueError`` unless they
    fill a buffer of ``nbytes``."""
    item = word_dtype(dtype).itemsize
    ranges, end = [], 0
    for count in counts:
        if count < 0 or count % item:
            break
        start, end = end, end + count // item
        ranges.append((start, end))
    if len(counts) != size or len(ranges) != size:
        raise ValueError(
            f"{size} ranks need {size} counts of at least 0 bytes, each a whole number of "
            f"{dtype}, found {list(counts)}"
        )
    if nbytes != end * item:
        raise ValueError(f"the buffer is of {nbytes} bytes, but counts add up to {end * item}")
    return ranges


class Segment(NamedTuple):
    """Part of a collective's buffer whose data are in separate memory, and are sent without a copy.

    Args:
        start: first byte in the buffer of an all-reduce, or in each block otherwise.
        data: the memory, read or written until the work is complete.
        counts: for buffers of blocks, bytes of each rank's part of ``data``; equal on all ranks.
        result: where an all-reduce writes the result instead of into the buffer, if
            ``Backend.copies_segments``; may be ``data``.
    """

    start: int
    data: Buffer
    counts: Sequence[int] = ()
    result: Buffer | None = None

    def parts(self, num_blocks: int, dtype: str, writeable: bool = True) -> list[Buffer]:
        """Its part of each block; the buffer of an all-reduce is one block."""
        if not self.counts:
            return [typed(self.data, dtype, writeable)]
        return blocks(num_blocks, self.data, self.counts, dtype, writeable)


def fill(buffer: Buffer, counts: Sequence[int], segments: Sequence[Segment], dtype: str) -> None:
    """Copy the segments into a buffer with blocks of ``counts`` bytes."""
    whole = blocks(len(counts), buffer.view(np.uint8), counts, "uint8")
    for segment in segments:
        parts = segment.parts(len(counts), dtype, writeable=False)
        for block, part in zip(whole, parts, strict=True):
            block[segment.start : segment.start + part.nbytes] = part.view(np.uint8)


class Piece(NamedTuple):
    """Some elements of a collective's buffer, or what replaces them ``elsewhere`` (a segment)."""

    start: int  # its first element's number in the buffer
    data: Buffer
    elsewhere: bool = False


def pieces(
    data: Buffer,
    shares: Sequence[tuple[int, int]],
    segments: Sequence[Segment],
    dtype: str = "uint8",
    writeable: bool = True,
) -> list[Piece]:
    """Consecutive pieces of a buffer of adjacent blocks, with the segments' part of each block."""
    found, end = [], 0
    placed = [
        (segment.start // data.itemsize, segment.parts(len(shares), dtype, writeable))
        for segment in segments
    ]
    for block, (block_start, _) in enumerate(shares):
        for within, parts in placed:
            start = block_start + within
            found += [Piece(end, data[end:start]), Piece(start, parts[block], elsewhere=True)]
            end = start + parts[block].size
    return [*found, Piece(end, data[end:])]


def between(whole: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The nonempty pieces of elements ``start`` to ``stop``."""
    found = []
    first = bisect_right(whole, start, key=itemgetter(0)) - 1
    for at, data, elsewhere in whole[first : bisect_left(whole, stop, key=itemgetter(0))]:
        piece = data[max(start - at, 0) : stop - at]
        if piece.size:
            found.append(Piece(max(start, at), piece, elsewhere))
    return found


def combine(shards: Sequence[Buffer], out: Buffer, dtype: str, op: Op) -> None:
    """Combine one contribution per rank (as :func:`typed` returns them), in rank order; the only
    definition of reduction. ``out`` is one of the shards or overlaps none."""
    reduce_shards(shards, out, dtype, *reduction(op, len(shards)))


def reduction(op: Op, num_ranks: int) -> tuple[str, float]:
    """The operation that combines the contributions, and the divisor of its result."""
    return ("sum", float(num_ranks)) if op is Op.AVERAGE else (op.value, 1.0)


def split(total: int, parts: int) -> list[tuple[int, int]]:
    """Start and end of ``parts`` consecutive ranges over ``total`` whose lengths differ by <= 1."""
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


class MemoryAt:
    """Memory at an address, described for NumPy (``array``) or PyTorch (``cuda_array``), which take
    it over without copying; keeps its owner alive."""

    def __init__(self, address: int, nbytes: int, owner: object, kind: str = "array") -> None:
        self.owner = owner
        facts = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        setattr(self, f"__{kind}_interface__", facts)


def zeroed(nbytes: int) -> Buffer:
    """``nbytes`` zeroed bytes, as uint8; ``MemoryError`` if memory is exhausted."""
    if nbytes < _MAPPED_BYTES:
        return np.zeros(nbytes, np.uint8)
    # Untouched pages cost nothing, such as the part of a fusion buffer whose tensors are sent from
    # where they are. The C library would clear memory that it has used before.
    # Private: a forked process writes to its own copy.
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes for a buffer: {error}") from error
    return np.frombuffer(pages, np.uint8)

"""Packing on a device, case by case: one arena of bytes before, and what it must be after.

The fusion buffer and the tensors lie in one arena, with bytes between them that nobody may touch,
so that a case is checked by comparing all of it. Host and device run the same cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from wfbp.comm.arrays import zeroed
from wfbp.core.types import item_bytes
from wfbp.cuda.pack import CASTS, CudaKernels, DevicePackTable

Bytes = npt.NDArray[np.uint8]

FLOATS = ("bfloat16", "float16", "float32", "float64")
PAIRS = [
    *((name, name) for name in ("uint8", "int32", "int64", *FLOATS)),
    *sorted(CASTS),
]
"""Element types of tensors and buffer."""

GUARD = 0xA5
STREAM = 7

AWKWARD_COUNTS = [
    *range(20),
    *(edge + by for edge in (1024, 2048, 4096, 8192) for by in (-1, 0, 1)),
    2 * 8192 + 5,
]
"""Numbers of elements around everything that a kernel counts in."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a case.

    Args:
        count: elements.
        shift: bytes by which the tensor misses an address that is a multiple of 16.
        slot_shift: the same of its slot in the buffer.
        place: "elsewhere", "absent", or "own" where it already lies in its slot.
    """

    count: int
    shift: int = 0
    slot_shift: int = 0
    place: str = "elsewhere"


@dataclass(frozen=True, slots=True)
class Case:
    """What to pack or unpack; ``tensor_dtype`` and ``dtype`` are a pair of :data:`PAIRS`."""

    tensors: tuple[Tensor, ...]
    tensor_dtype: str
    dtype: str
    packs: bool = True
    seed: int = 0


@st.composite
def cases(draw: st.DrawFn, max_tensors: int = 5) -> Case:
    """Random cases."""
    tensor_dtype, dtype = draw(st.sampled_from(PAIRS))
    places = ["elsewhere", "elsewhere", "absent", *(["own"] if dtype == tensor_dtype else [])]
    # Frameworks align tensors to their elements; the kernels ask for nothing.
    shift, slot_shift = (
        st.one_of(st.just(0), st.integers(0, 15), st.integers(0, 15 // item).map(item.__mul__))
        for item in (item_bytes(tensor_dtype), item_bytes(dtype))
    )
    tensor = st.builds(
        Tensor,
        count=st.one_of(st.sampled_from(AWKWARD_COUNTS), st.integers(0, 3000)),
        shift=shift,
        slot_shift=slot_shift,
        place=st.sampled_from(places),
    )
    return Case(
        tensors=tuple(draw(st.lists(tensor, max_size=max_tensors))),
        tensor_dtype=tensor_dtype,
        dtype=dtype,
        packs=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


class Layout:
    """Where everything of a case lies in its arena, and the arena's bytes before."""

    def __init__(self, case: Case) -> None:
        self.case = case
        item, tensor_item = item_bytes(case.dtype), item_bytes(case.tensor_dtype)
        self.offsets, end = _places([(t.count * item, t.slot_shift) for t in case.tensors], 0)
        self.capacity = end
        starts, end = _places([(t.count * tensor_item, t.shift) for t in case.tensors], end + 64)
        self.starts = [
            {"elsewhere": start, "absent": None, "own": offset}[t.place]
            for t, start, offset in zip(case.tensors, starts, self.offsets, strict=True)
        ]
        self.sizes = [t.count * item for t in case.tensors]
        self.tensor_sizes = [t.count * tensor_item for t in case.tensors]
        self.before = zeroed(end + 64)
        self.before[:] = GUARD
        random = np.random.default_rng(case.seed)
        for i, start in enumerate(self.starts):
            for begin, dtype in ((start, case.tensor_dtype), (self.offsets[i], case.dtype)):
                if begin is not None:
                    values = awkward_values(random, case.tensors[i].count, dtype)
                    self.before[begin : begin + values.size] = values

    def moves(self) -> list[tuple[slice | None, slice]]:
        """From where to where bytes go; from None come zeros."""
        moves: list[tuple[slice | None, slice]] = []
        for i, start in enumerate(self.starts):
            slot = slice(self.offsets[i], self.offsets[i] + self.sizes[i])
            tensor = None if start is None else slice(start, start + self.tensor_sizes[i])
            if self.case.packs:
                moves.append((tensor, slot))
            elif tensor is not None:
                moves.append((slot, tensor))
        return moves

    def after(self) -> Bytes:
        """The arena as it must be."""
        case = self.case
        source, target = case.tensor_dtype, case.dtype
        if not case.packs:
            source, target = target, source
        after: Bytes = self.before.copy()
        for origin, goal in self.moves():
            after[goal] = 0 if origin is None else _converted(self.before[origin], source, target)
        return after

    def without_nans(self, arena: Bytes) -> Bytes:
        """The arena with one and the same NaN for all that kernels have computed."""
        case = self.case
        target = case.dtype if case.packs else case.tensor_dtype
        if case.dtype == case.tensor_dtype:
            return arena
        calm: Bytes = arena.copy()
        for _, goal in self.moves():
            values = calm[goal].copy().view(_numpy_dtype(target))
            values[np.isnan(values)] = np.nan
            calm[goal] = values.view(np.uint8)
        return calm

    def arrays(self, arena: Bytes) -> list[Bytes]:
        """What a kernel may touch: the slots and the tensors."""
        ends = [(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True)]
        for start, size in zip(self.starts, self.tensor_sizes, strict=True):
            ends += [] if start is None else [(start, start + size)]
        return [arena[first:last] for first, last in ends]


def run(layout: Layout, kernels: CudaKernels, address: int, stream: int = STREAM) -> None:
    """Pack or unpack in the arena at an address."""
    case = layout.case
    table = DevicePackTable(
        kernels,
        address,
        layout.capacity,
        layout.offsets,
        layout.sizes,
        case.dtype,
        stream,
        case.tensor_dtype,
    )
    table.pointers[:] = [0 if start is None else address + start for start in layout.starts]
    if case.packs:
        table.pack()
    else:
        table.unpack()


def check(layout: Layout, arena: Bytes) -> None:
    """Compare an arena with what it must be."""
    np.testing.assert_array_equal(
        layout.without_nans(arena), layout.without_nans(layout.after()), str(layout.case)
    )


def awkward_values(random: np.random.Generator, count: int, dtype: str) -> Bytes:
    """Ordinary numbers, any bits at all, and ties between two halves, as bytes."""
    if dtype not in FLOATS:
        return random.integers(0, 256, count * item_bytes(dtype), np.uint8)
    kind = _numpy_dtype(dtype)
    values = (random.standard_normal(count) * 100).astype(kind)
    bits = random.integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    values = np.where(random.random(count) < 0.3, bits, values)
    if dtype == "float32":
        for kept in (13, 16):  # bits that float16 and bfloat16 drop; the highest of them: a tie
            tie = (values.view(np.uint32) >> kept << kept) | np.uint32(1 << (kept - 1))
            values = np.where(random.random(count) < 0.1, tie.view(np.float32), values)
        small = np.float32(2.0**-24) * (random.integers(0, 64, count) / 2).astype(np.float32)
        values = np.where(random.random(count) < 0.1, small, values)
    return np.ascontiguousarray(values).view(np.uint8)


def _converted(raw: Bytes, source: str, target: str) -> Bytes:
    """The reference, by NumPy and ml_dtypes."""
    if source == target:
        return raw
    with np.errstate(all="ignore"):
        values = raw.copy().view(_numpy_dtype(source)).astype(np.float32)
        converted: Bytes = values.astype(_numpy_dtype(target)).view(np.uint8)
    return converted


def _numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _places(blocks: list[tuple[int, int]], end: int) -> tuple[list[int], int]:
    """Starts of blocks of bytes, each off a multiple of 16 by its shift, with room between."""
    starts = []
    for size, shift in blocks:
        start = -(-end // 16) * 16 + 16 + shift
        starts.append(start)
        end = start + size
    return starts, end + 16

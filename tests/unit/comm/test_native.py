"""The packing extension, compared with NumPy."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wfbp import _native
from wfbp.core.types import ITEM_BYTES, item_bytes

FLOATS = ("float16", "bfloat16", "float32", "float64")
HALVES = ("float16", "bfloat16")
OPS = ("sum", "min", "max", "product")
ALL_HALVES = np.arange(65536, dtype=np.uint16)


@pytest.fixture(scope="module", params=dict.fromkeys(["portable", _native.INSTRUCTIONS]))
def pack(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Every set of kernels that this machine can run."""
    _native.use_instructions(request.param)
    yield _native
    _native.use_instructions(_native.INSTRUCTIONS)


def widen(halves: npt.NDArray[np.uint16], dtype: str) -> npt.NDArray[np.float64]:
    """Exact values, decoded field by field from the format's definition."""
    bits, bias = (10, 15) if dtype == "float16" else (7, 127)
    raw = halves.astype(np.int64)
    sign = np.where(raw >> 15, -1.0, 1.0)
    top = (1 << (15 - bits)) - 1
    exponent, fraction = (raw >> bits) & top, (raw & ((1 << bits) - 1)) / 2.0**bits
    normal = np.ldexp(1.0 + fraction, exponent - bias)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), normal)
    value = np.where(exponent == top, np.where(fraction == 0, np.inf, np.nan), value)
    return sign * value


def narrow(values: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.uint16]:
    """Nearest half by search among all of them; ties go to the even one."""
    bits = 10 if dtype == "float16" else 7
    infinity = ((1 << (15 - bits)) - 1) << bits
    ladder = widen(np.arange(infinity, dtype=np.uint16), dtype)
    ladder = np.append(ladder, 2 * ladder[-1] - ladder[-2])  # where infinity would stand
    magnitude = np.abs(values)
    above = np.clip(np.searchsorted(ladder, magnitude), 1, infinity)
    below = above - 1
    to_lower, to_upper = magnitude - ladder[below], ladder[above] - magnitude
    up = (to_upper < to_lower) | ((to_upper == to_lower) & (above % 2 == 0))
    out = np.where(up, above, below)
    out = np.where(magnitude == 0, 0, np.where(magnitude >= ladder[-1], infinity, out))
    out = np.where(np.isnan(values), infinity + (1 << (bits - 1)), out)
    signed: npt.NDArray[np.int64] = out | (np.signbit(values).astype(np.int64) << 15)
    return signed.astype(np.uint16)


def same_halves(a: npt.NDArray[np.uint16], b: npt.NDArray[np.uint16], dtype: str) -> bool:
    """Equal bit for bit, any NaN counting as any other."""
    nan_a, nan_b = np.isnan(widen(a, dtype)), np.isnan(widen(b, dtype))
    return bool(np.all(nan_a == nan_b) and np.all((a == b) | nan_a))


def storage(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def at_offset(values: npt.NDArray[Any], shift: int) -> npt.NDArray[np.uint8]:
    """The bytes of ``values``, ``shift`` bytes behind an aligned address."""
    room = np.zeros(values.nbytes + 64 + shift, np.uint8)
    start = -room.ctypes.data % 64 + shift
    room[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
    return room[start : start + values.nbytes]


def random_values(rng: np.random.Generator, n: int, dtype: str) -> npt.NDArray[Any]:
    """Any bits for floats (NaN, infinities and subnormals among them), any value for integers."""
    raw = rng.integers(0, 256, n * item_bytes(dtype), dtype=np.uint8)
    return raw.view(storage(dtype))


def scaled(values: npt.NDArray[Any], dtype: str, factor: float) -> npt.NDArray[Any]:
    with np.errstate(all="ignore"):
        if dtype in HALVES:
            product = widen(values.view(np.uint16), dtype).astype(np.float32) * np.float32(factor)
            return narrow(product.astype(np.float64), dtype).view(storage(dtype))
        result: npt.NDArray[Any] = values * values.dtype.type(factor)
        return result


def assert_same(found: npt.NDArray[Any], expected: npt.NDArray[Any], dtype: str) -> None:
    if dtype in HALVES:
        assert same_halves(found.view(np.uint16), expected.view(np.uint16), dtype)
    else:
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=60)
@given(data=st.data())
def test_pack_fills_every_slot_and_nothing_else(pack: ModuleType, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(ITEM_BYTES)))
    sizes = data.draw(st.lists(st.integers(0, 1100), min_size=0, max_size=8))
    gaps = data.draw(st.lists(st.integers(0, 19), min_size=len(sizes), max_size=len(sizes)))
    kinds = data.draw(
        st.lists(
            st.sampled_from(["array", "absent", "slot"]), min_size=len(sizes), max_size=len(sizes)
        )
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    offsets, nbytes, end = [], [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        offsets.append(end + gap)
        nbytes.append(size * item_bytes(dtype))
        end = offsets[-1] + nbytes[-1]
    destination = rng.integers(0, 256, end + 7, dtype=np.uint8)
    expected = destination.copy()
    table = pack.PackTable(destination, offsets, nbytes, dtype)
    sources = []
    for i, kind in enumerate(kinds):
        span = slice(offsets[i], offsets[i] + nbytes[i])
        values = random_values(rng, sizes[i], dtype)
        if kind == "absent":
            expected[span] = 0
            continue
        if kind == "array":
            sources.append(at_offset(values, int(rng.integers(0, 17))))
            table.pointers[i] = sources[-1].ctypes.data
        else:
            destination[span] = values.view(np.uint8)
            table.pointers[i] = destination.ctypes.data + offsets[i]
        expected[span] = values.view(np.uint8)
    table.pack()
    inside = np.zeros(destination.size, bool)
    for offset, size in zip(offsets, nbytes, strict=True):
        inside[offset : offset + size] = True
    assert np.array_equal(destination[inside], expected[inside])
    assert np.array_equal(destination[~inside], expected[~inside])


def test_unpack_gives_back_what_pack_took(pack: ModuleType) -> None:
    rng = np.random.default_rng(1)
    destination = rng.integers(0, 256, 5000, dtype=np.uint8)
    table = pack.PackTable(destination, [3, 1600, 3300], [1200, 1204, 1600], "float32")
    target = at_offset(np.zeros(300, np.float32), 5)
    before = destination.copy()
    table.pointers[:] = [target.ctypes.data, 0, destination.ctypes.data + 3300]
    table.unpack()
    assert np.array_equal(target, before[3:1203])
    assert np.array_equal(destination, before)


def test_pack_streams_large_groups_exactly(pack: ModuleType) -> None:
    rng = np.random.default_rng(2)
    sizes = [10_000_003, 17, 14_000_001, 65_535, 65_537, 12_000_000]
    offsets = np.cumsum([1, *sizes])[:-1]
    destination = np.zeros(sum(sizes) + 2, np.uint8)
    sources = [at_offset(rng.integers(0, 256, n, dtype=np.uint8), i) for i, n in enumerate(sizes)]
    table = pack.PackTable(destination, offsets, sizes, "uint8")
    table.pointers[:] = [source.ctypes.data for source in sources]
    table.pack()
    assert np.array_equal(destination[1:-1], np.concatenate(sources))
    assert destination[0] == destination[-1] == 0
    destination[:] = rng.integers(0, 256, destination.size, dtype=np.uint8)
    table.unpack()
    assert np.array_equal(destination[1:-1], np.concatenate(sources))


def test_pointers_share_memory_with_the_table_and_outlive_it(pack: ModuleType) -> None:
    destination = np.zeros(8, np.uint8)
    source = np.array([7.0], np.float64)
    table = pack.PackTable(destination, [0], [8], "float64")
    pointers = table.pointers
    assert pointers.dtype == np.int64
    assert pointers.tolist() == [0]
    pointers[0] = source.ctypes.data
    table.pack()
    assert destination.view(np.float64)[0] == 7.0
    del table
    gc.collect()
    assert pointers[0] == source.ctypes.data


def test_table_keeps_its_destination_alive(pack: ModuleType) -> None:
    base = np.zeros(1 << 22, np.uint8)
    table = pack.PackTable(base[:], [0], [1 << 22], "uint8")
    source = np.full(1 << 22, 9, np.uint8)
    table.pointers[0] = source.ctypes.data
    del base
    gc.collect()
    table.pack()
    source[:] = 0
    table.unpack()
    assert source.min() == source.max() == 9


@pytest.mark.parametrize(
    ("offsets", "nbytes", "message"),
    [
        ([0, 12], [8, 8], "slot 1 .*inside the destination of 16"),
        ([2**62], [2**62], "slot 0"),
        ([-4], [4], "slot 0"),
        ([0], [6], "slot 0 has 6 bytes: not a whole number of float32"),
        ([0, 4], [4], "2 offsets but 1 sizes"),
    ],
)
def test_table_refuses_wrong_slots(
    pack: ModuleType, offsets: list[int], nbytes: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack.PackTable(np.zeros(16, np.uint8), offsets, nbytes, "float32")


def test_wrong_arrays_are_refused(pack: ModuleType) -> None:
    read_only = np.zeros(16, np.uint8)
    read_only.flags.writeable = False
    for destination in (
        read_only,
        np.zeros(16, np.float32),
        np.zeros((4, 4), np.uint8),
        np.zeros(32, np.uint8)[::2],
    ):
        with pytest.raises(ValueError, match="destination must be"):
            pack.PackTable(destination, [0], [4], "float32")
    with pytest.raises(ValueError, match="writable"):
        pack.scale(read_only, "float32", 2.0)
    with pytest.raises(ValueError, match="whole number"):
        pack.scale(np.zeros(6, np.uint8), "float32", 2.0)
    with pytest.raises(ValueError, match="complex64"):
        pack.PackTable(np.zeros(16, np.uint8), [0], [8], "complex64")


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_integers_are_not_scaled(pack: ModuleType, dtype: str) -> None:
    values = np.arange(16, dtype=dtype)
    with pytest.raises(ValueError, match="can only be copied"):
        pack.scale(values, dtype, 2.0)
    pack.scale(values, dtype, 1.0)
    assert values.tolist() == list(range(16))


@pytest.mark.parametrize("factor", [0.25, 1 / 3, -1e-3, 7e4, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_scale_rounds_once(pack: ModuleType, dtype: str, factor: float) -> None:
    if dtype in HALVES:
        values = ALL_HALVES.view(storage(dtype)).copy()
    else:
        values = random_values(np.random.default_rng(3), 4099, dtype)
    expected = scaled(values, dtype, factor)
    pack.scale(values, dtype, factor)
    assert_same(values, expected, dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_goes_to_nearest_even(pack: ModuleType, dtype: str) -> None:
    rng = np.random.default_rng(4)
    a, b = rng.permutation(ALL_HALVES), rng.permutation(ALL_HALVES)
    out = np.zeros_like(a)
    with np.errstate(all="ignore"):
        total = (widen(a, dtype).astype(np.float32) + widen(b, dtype).astype(np.float32)).astype(
            np.float64
        )
    pack.reduce_shards([a, b], out, dtype, "sum")
    assert same_halves(out, narrow(total, dtype), dtype)
    # A tie by construction: half a unit above one goes down, above the next value goes up.
    one, unit = (0x3C00, 2.0**-10) if dtype == "float16" else (0x3F80, 2.0**-7)
    half_unit = narrow(np.array([unit / 2]), dtype)[0]
    ties = np.array([one, one + 1], np.uint16)
    pack.reduce_shards([ties, np.full(2, half_unit, np.uint16)], out[:2], dtype, "sum")
    assert out[:2].tolist() == [one, one + 2]


@settings(max_examples=100)
@given(
    dtype=st.sampled_from(HALVES),
    op=st.sampled_from(OPS),
    k=st.integers(1, 6),
    n=st.sampled_from([0, 1, 8, 9, 512, 513]) | st.integers(0, 1500),
    divisor=st.sampled_from([1.0, 2.0, 3.0, 7.0]),
    seed=st.integers(0, 2**32),
)
def test_reduce_accumulates_in_float32(
    pack: ModuleType, dtype: str, op: str, k: int, n: int, divisor: float, seed: int
) -> None:
    """Any bits, also NaN and infinities; from odd addresses, and in place."""
    shards = np.random.default_rng(seed).integers(0, 65536, (k, n), dtype=np.uint16)
    fold = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    with np.errstate(all="ignore"):
        total = widen(shards[0], dtype).astype(np.float32)
        for row in shards[1:]:
            total = fold(total, widen(row, dtype).astype(np.float32))
        expected = narrow((total / np.float32(divisor)).astype(np.float64), dtype)
    out = np.zeros(2 * n + 1, np.uint8)[1:].view(np.uint16)
    rows = [at_offset(row, 2 * k + 1).view(np.uint16) for k, row in enumerate(shards)]
    pack.reduce_shards(rows, out, dtype, op, divisor)
    assert same_halves(out, expected, dtype)
    pack.reduce_shards(shards, shards[0], dtype, op, divisor)  # a matrix
    assert same_halves(shards[0], expected, dtype)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads within a test."""
    yield _native.use_threads
    _native.use_threads(1)


SEVERAL = [(2 << 20) - 4, 2 << 20, (2 << 20) + 12, (9 << 20) + 20]
"""Bytes at which a second thread begins, and of more parts than threads."""


@pytest.mark.parametrize("nbytes", SEVERAL)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_threads_reduce_as_one_does(
    threads: Callable[[int], None], dtype: str, nbytes: int
) -> None:
    kind = "u2" if dtype == "float16" else dtype
    rng = np.random.default_rng(nbytes)
    shards = [rng.integers(0, 2**12, nbytes // np.dtype(kind).itemsize).astype(kind) for _ in "abc"]
    alone, together = np.zeros_like(shards[0]), np.zeros_like(shards[0])
    _native.reduce_shards(shards, alone, dtype, "sum", 3)
    for number in (2, 3):
        threads(number)
        together[:] = 0
        _native.reduce_shards(shards, together, dtype, "sum", 3)
        assert np.array_equal(together, alone)
    _native.reduce_shards(shards, shards[1], dtype, "sum", 3)  # in place
    assert np.array_equal(shards[1], alone)


@pytest.mark.parametrize("nbytes", [0, 1, 4099, *SEVERAL])
def test_threads_copy_all(threads: Callable[[int], None], nbytes: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes).astype(np.uint8)
    for number in (1, 2, 3):
        threads(number)
        room = np.zeros(nbytes + 2, np.uint8)
        _native.copy(room[1:-1], source)
        assert np.array_equal(room[1:-1], source)
        assert not room[0]
        assert not room[-1]


def test_copy_refuses_wrong_arguments() -> None:
    eight, frozen = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="source must be a C-contiguous array of 8 bytes"):
        _native.copy(eight, eight[:7])
    with pytest.raises(ValueError, match="source must be a C-contiguous array of 8 bytes"):
        _native.copy(eight, np.zeros(16, np.uint8)[::2])
    with pytest.raises(ValueError, match="target must be a writable"):
        _native.copy(frozen, eight)


def test_reduce_refuses_wrong_arguments(pack: ModuleType) -> None:
    good = np.zeros(4, np.uint16)
    with pytest.raises(ValueError, match="at least one"):
        pack.reduce_shards([], good, "float16", "sum")
    with pytest.raises(ValueError, match=r"shard 1 must be .* 4 elements"):
        pack.reduce_shards([good, good[:3]], good, "float16", "sum")
    with pytest.raises(ValueError, match=r"complex64"):
        pack.reduce_shards([good], good, "complex64", "sum")
    whole = np.zeros(4, np.int32)
    for op, divisor in (("max", 2.0), ("sum", 2.5), ("sum", -1.0), ("sum", 0.0)):
        with pytest.raises(ValueError, match="only a sum can, by a whole number"):
            pack.reduce_shards([whole], whole, "int32", op, divisor)
    with pytest.raises(ValueError, match="'mean' is not one of"):
        pack.reduce_shards([good], good, "float16", "mean")
    with pytest.raises(ValueError, match="2-byte"):
        pack.reduce_shards([good], np.zeros(4, np.float32), "float16", "sum")


@settings(max_examples=150)
@given(
    dtype=st.sampled_from(sorted(set(ITEM_BYTES) - set(HALVES))),
    op=st.sampled_from(OPS),
    k=st.integers(1, 5),
    n=st.integers(0, 1500),
    divisor=st.sampled_from([1.0, 2.0, 3.0, 4.0]),
    place=st.integers(0, 5),
    seed=st.integers(0, 2**32),
)
def test_reduce_is_what_numpy_gives_in_order(
    pack: ModuleType, dtype: str, op: str, k: int, n: int, divisor: float, place: int, seed: int
) -> None:
    """Any bits, also NaN and infinities; the result anywhere, also in a shard's place."""
    rng = np.random.default_rng(seed)
    shards = [random_values(rng, n, dtype) for _ in range(k)]
    if dtype not in FLOATS and op != "sum":
        divisor = 1.0
    fold = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    with np.errstate(all="ignore"):
        if dtype not in FLOATS and divisor != 1.0:
            exact = sum(shard.astype(object) for shard in shards)
            quotients = [int(abs(v) // int(divisor) * (1 if v >= 0 else -1)) for v in exact]
            wrapped = [(v + 2**63) % 2**64 - 2**63 for v in quotients]  # a divisor may be too small
            expected = np.array(wrapped, np.int64).astype(dtype)
        else:
            expected = shards[0].copy()
            for shard in shards[1:]:
                expected = fold(expected, shard)
            if divisor != 1.0:
                expected = expected / expected.dtype.type(divisor)
    rows = [at_offset(shard, 2 * i + 1).view(dtype) for i, shard in enumerate(shards)]
    others = [row.copy() for row in rows]
    out = rows[place] if place < k else at_offset(np.zeros(n, dtype), 3).view(dtype)
    pack.reduce_shards(rows, out, dtype, op, divisor)
    np.testing.assert_array_equal(out, expected)
    for i, (row, other) in enumerate(zip(rows, others, strict=True)):
        assert i == place or row.tobytes() == other.tobytes()


def test_pack_lets_other_threads_run() -> None:
    """The main thread wakes inside a pack, although no thread is ever asked to make room."""
    source = np.ones(64 << 20, np.uint8)
    table = _native.PackTable(np.zeros_like(source), [0], [source.size], "uint8")
    table.pointers[0] = source.ctypes.data
    started = threading.Event()
    ends: list[float] = []

    def work() -> None:
        started.set()
        table.pack()
        ends.append(time.monotonic())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        for _ in range(20):
            started.clear()
            thread = threading.Thread(target=work)
            thread.start()
            started.wait(10)
            awake = time.monotonic()
            thread.join(10)
            if awake < ends[-1]:
                return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("no other thread ran during 20 calls of pack: it holds the GIL")


def test_unknown_instructions_are_refused() -> None:
    with pytest.raises(ValueError, match="'abacus'"):
        _native.use_instructions("abacus")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_a_table_casts(pack: ModuleType, dtype: str, wide: str) -> None:
    """To the nearest half, ties to even, by way of float32; and back exactly."""
    chance = np.random.default_rng(5)
    bits = chance.integers(0, 2**32, 3000, dtype=np.uint32)
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65519.9, 65520.0]
    edges += [1e-8, 3e38, 2049.0, 257.0]
    with np.errstate(all="ignore"):
        values = np.concatenate([bits.view(np.float32), np.float32(edges)]).astype(wide)
    count = len(values)
    buffer = np.full(16 + 2 * count + 2, 7, np.uint8)
    table = pack.PackTable(buffer, [0, 16], [16, 2 * count], dtype, wide)
    table.pointers[:] = [0, values.ctypes.data]
    table.pack()
    halves = buffer[16 : 16 + 2 * count].view(np.uint16)
    with np.errstate(all="ignore"):
        wanted = narrow(values.astype(np.float32).astype(np.float64), dtype)
    assert same_halves(halves, wanted, dtype)
    assert (buffer[:16] == 0).all()
    assert (buffer[-2:] == 7).all()
    back = np.full(count + 1, 5.0, wide)
    table.pointers[1] = back.ctypes.data
    table.unpack()
    with np.errstate(invalid="ignore"):  # newer NumPys warn of casts of signalling NaNs
        assert np.array_equal(back[:-1], widen(halves, dtype), equal_nan=True)
    assert back[-1] == 5.0


def test_what_a_table_cannot_cast_is_refused(pack: ModuleType) -> None:
    for dtype, wide in (("float32", "float64"), ("float16", "bfloat16"), ("float16", "int32")):
        with pytest.raises(ValueError, match=f"{wide} cannot be packed as {dtype}"):
            pack.PackTable(np.zeros(16, np.uint8), [0], [8], dtype, wide)


def test_sources_without_the_extension_say_where_they_are() -> None:
    """A program beside a checkout imports its folder instead of what was installed."""
    code = "import sys; sys.modules['wfbp._native'] = None; import wfbp, wfbp.core; wfbp.init"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert told.startswith("ImportError: the C++ extension wfbp._native, which wfbp needs")
    assert f"the sources in {root}" in told
    assert "C++17 compiler and run `make install`" in told

"""The CUDA packing kernels, compiled as C++, against NumPy; and what is asked of the driver."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cuda_cases import (
    AWKWARD_COUNTS,
    PAIRS,
    STREAM,
    Case,
    Layout,
    Tensor,
    cases,
    check,
    run,
)
from tests.support.cuda_kernels import HostKernels, build
from wfbp.cuda.pack import (
    ARGUMENTS,
    CAPACITY,
    LARGEST_TILE_BYTES,
    SMALLEST_TILE_BYTES,
    THREADS,
    DevicePackTable,
    kernel_name,
    source,
)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return build()


def run_on_host(case: Case, library: ctypes.CDLL, backwards: bool = False) -> HostKernels:
    """Run a case and compare every byte; returns what was launched."""
    layout = Layout(case)
    arena = layout.before
    expected = Layout(case)
    kernels = HostKernels(library, backwards)
    kernels.allow(layout.arrays(arena))
    run(layout, kernels, arena.ctypes.data)
    check(expected, arena)
    return kernels


@given(case=cases(), backwards=st.booleans())
@settings(max_examples=100)
def test_random_cases(library: ctypes.CDLL, case: Case, backwards: bool) -> None:
    run_on_host(case, library, backwards)


@pytest.mark.parametrize("packs", [True, False], ids=["pack", "unpack"])
@pytest.mark.parametrize(("tensor_dtype", "dtype"), PAIRS)
def test_every_size_and_alignment(
    library: ctypes.CDLL, tensor_dtype: str, dtype: str, packs: bool
) -> None:
    tensors = [Tensor(count) for count in AWKWARD_COUNTS]
    tensors += [Tensor(75, shift, other) for shift in range(16) for other in range(16)]
    run_on_host(Case(tuple(tensors), tensor_dtype, dtype, packs), library)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_every_half(library: ctypes.CDLL, half: str) -> None:
    """All 65536 values survive the way to float32, and that within the type."""
    for target in ("float32", half):
        case = Case((Tensor(65536),), half, target)
        layout, expected = Layout(case), Layout(case)
        for one in (layout, expected):
            start = one.starts[0]
            assert start is not None
            one.before[start : start + 2 * 65536] = np.arange(65536, dtype=np.uint16).view(np.uint8)
        kernels = HostKernels(library)
        kernels.allow(layout.arrays(layout.before))
        run(layout, kernels, layout.before.ctypes.data)
        check(expected, layout.before)


@pytest.mark.parametrize(
    ("tensor_dtype", "dtype", "words"),
    [
        ("float32", "float32", 2 * 4096 // 4),
        ("float16", "float16", 2 * 4096 // 8),
        # The wider side of a cast is counted in pairs of words.
        ("float32", "bfloat16", 2 * 4096 // 8),
        ("float16", "float32", 2 * 4096 // 8),
    ],
)
@pytest.mark.parametrize("shift", [0, 8])
def test_moves_in_whole_words_where_alignment_agrees(
    library: ctypes.CDLL, tensor_dtype: str, dtype: str, words: int, shift: int
) -> None:
    same = tensor_dtype == dtype
    case = Case((Tensor(4096, shift, shift if same else 0),), tensor_dtype, dtype)
    kernels = run_on_host(case, library)
    if shift == 0:
        assert kernels.num_accesses == words
    elif same:  # single elements up to the first whole word, and after the last
        assert words < kernels.num_accesses <= 1.1 * words


def test_absent_tensor_costs_only_writes(library: ctypes.CDLL) -> None:
    kernels = run_on_host(Case((Tensor(4096, place="absent"),), "float32", "float32"), library)
    assert kernels.num_accesses == 4096 // 4


def test_tensor_in_its_own_slot_is_not_touched(library: ctypes.CDLL) -> None:
    tensors = (Tensor(4096, place="own"),)
    kernels = run_on_host(Case(tensors, "float32", "float32"), library)
    assert kernels.num_accesses == 0


def test_overreach_is_seen(library: ctypes.CDLL) -> None:
    """The check itself can fail: a slot that nobody may touch."""
    layout = Layout(Case((Tensor(5), Tensor(5)), "float32", "float32"))
    kernels = HostKernels(library)
    kernels.allow(layout.arrays(layout.before)[:1])
    with pytest.raises(AssertionError, match="outside every tensor and slot"):
        run(layout, kernels, layout.before.ctypes.data)


def test_layout_of_arguments(library: ctypes.CDLL) -> None:
    assert library.bytes_of_arguments() == ARGUMENTS.itemsize <= 4096
    assert library.threads_per_block() == THREADS


def table(kernels: HostKernels, counts: list[int], dtype: str = "float32") -> DevicePackTable:
    """A table of tensors that lie one after another, 16 bytes apart, in a buffer at 4096."""
    sizes = [4 * count for count in counts]
    offsets = [sum(-(-size // 16) * 16 for size in sizes[:i]) for i in range(len(sizes))]
    return DevicePackTable(kernels, 4096, 2**40, offsets, sizes, dtype, STREAM)


@given(st.lists(st.one_of(st.integers(0, 50), st.integers(0, 3_000_000)), max_size=30))
def test_tiles_cover_every_element_once(counts: list[int]) -> None:
    kernels = HostKernels()
    packing = table(kernels, counts)
    packing.pack()
    launches = kernels.launches
    assert len(launches) == (1 if any(counts) else 0)
    if not launches:
        return
    tiles = kernels.tiles(launches[0])
    assert tiles["count"].min() > 0
    assert 4 * tiles["count"].max() <= LARGEST_TILE_BYTES
    for slot, count in enumerate(counts):
        mine = tiles[tiles["slot"] == slot]
        begins = mine["in_tensor"] // 4
        assert begins.tolist() == [0, *np.cumsum(mine["count"])[:-1]][: len(mine)]
        assert mine["count"].sum() == count
        offsets = set((mine["in_buffer"] - mine["in_tensor"]).tolist())
        assert len(offsets) <= 1


def test_small_groups_are_cut_finer() -> None:
    few, many = HostKernels(), HostKernels()
    table(few, [100_000]).pack()
    table(many, [10_000_000]).pack()
    assert 4 * few.tiles(few.launches[0])["count"].max() == SMALLEST_TILE_BYTES
    assert 4 * many.tiles(many.launches[0])["count"].max() == LARGEST_TILE_BYTES


def test_one_launch_per_group() -> None:
    kernels = HostKernels()
    packing = table(kernels, [1 + i % 7 for i in range(CAPACITY)])
    packing.pointers[:] = range(16, 16 * CAPACITY + 1, 16)
    packing.pack()
    packing.unpack()
    pack, unpack = kernels.launches
    assert (pack.name, unpack.name) == ("copy", "copy")
    assert (pack.stream, unpack.stream) == (STREAM, STREAM)
    assert pack.num_blocks == unpack.num_blocks == CAPACITY
    assert pack.tensors == unpack.tensors == packing.pointers.tolist()
    assert (pack.arguments["packs"], unpack.arguments["packs"]) == (1, 0)
    assert pack.arguments["buffer"] == unpack.arguments["buffer"] == 4096
    assert unpack.arguments["item"] == 4
    assert len(kernels.uploads) == 1, "the table goes to the device once, when it is made"


def test_more_tensors_than_a_launch_takes(library: ctypes.CDLL) -> None:
    tensors = tuple(
        Tensor(i % 9, place="absent" if i % 5 == 0 else "elsewhere") for i in range(1200)
    )
    kernels = run_on_host(Case(tensors, "float32", "bfloat16"), library)
    assert len(kernels.launches) == 3
    assert len(kernels.uploads) == 1


def test_addresses_travel_with_the_launch() -> None:
    """What is written into ``pointers`` afterwards does not change a launch that is under way."""
    kernels = HostKernels()
    packing = table(kernels, [3, 3])
    packing.pointers[:] = [16, 32]
    packing.pack()
    packing.pointers[:] = [48, 0]
    packing.pack()
    assert [launch.tensors for launch in kernels.launches] == [[16, 32], [48]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [8, 8], "float32", 0), "1 offsets but 2 sizes"),
        (
            ([60], [8], "float32", 0),
            r"slot 0 \(offset 60, 8 bytes\) is not inside the buffer of 64",
        ),
        (([-4], [8], "float32", 0), "is not inside the buffer"),
        (([0], [6], "float32", 0), "slot 0 has 6 bytes: not a whole number of float32"),
        (([0], [8], "complex64", 0), "dtype 'complex64' cannot be sent"),
        (([0], [8], "float32", 0, "float64"), "no kernel turns float64 into float32"),
        (([0], [8], "float16", 0, "bfloat16"), "no kernel turns bfloat16 into float16"),
    ],
)
def test_mistakes(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DevicePackTable(HostKernels(), 4096, 64, *arguments)  # type: ignore[arg-type]


def test_every_named_kernel_is_in_the_source() -> None:
    text = source()
    for tensor_dtype, dtype in PAIRS:
        if tensor_dtype != dtype:
            for name in (kernel_name(tensor_dtype, dtype), kernel_name(dtype, tensor_dtype)):
                assert f"X({name}," in text

"""The packing kernels on a GPU: the cases of the host, and what only a device can show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.benchmarks.pack import mixes
from tests.support.cuda_cases import AWKWARD_COUNTS, PAIRS, Case, Layout, Tensor, cases, check, run
from wfbp.core.plan import layout as plan_layout
from wfbp.cuda.pack import CAPACITY, CASTS, THREADS, CudaKernels, DevicePackTable, kernel_name

pytestmark = pytest.mark.gpu

DAWDLE = """
extern "C" __global__ void dawdle(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {}
}
"""


@pytest.fixture(scope="module")
def kernels(cupy: Any) -> CudaKernels:
    return CudaKernels()


def run_on_device(cupy: Any, kernels: CudaKernels, case: Case) -> None:
    """Run a case on a stream of its own, and compare every byte of the arena."""
    layout = Layout(case)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arena = cupy.asarray(layout.before)
        run(layout, kernels, arena.data.ptr, stream.ptr)
        after = cupy.asnumpy(arena)
    check(layout, after)


@given(case=cases(max_tensors=12))
@settings(max_examples=300)
def test_random_cases(cupy: Any, kernels: CudaKernels, case: Case) -> None:
    run_on_device(cupy, kernels, case)


@pytest.mark.parametrize("packs", [True, False], ids=["pack", "unpack"])
@pytest.mark.parametrize(("tensor_dtype", "dtype"), PAIRS)
def test_every_size_and_alignment(
    cupy: Any, kernels: CudaKernels, tensor_dtype: str, dtype: str, packs: bool
) -> None:
    tensors = [Tensor(count) for count in AWKWARD_COUNTS]
    tensors += [Tensor(75, shift, other) for shift in range(16) for other in range(16)]
    run_on_device(cupy, kernels, Case(tuple(tensors), tensor_dtype, dtype, packs))


@pytest.mark.parametrize(("tensor_dtype", "dtype"), PAIRS)
def test_more_tensors_than_a_launch_takes(
    cupy: Any, kernels: CudaKernels, tensor_dtype: str, dtype: str
) -> None:
    places = ("elsewhere", "absent", "elsewhere")
    tensors = [Tensor(i % 99, place=places[i % 3]) for i in range(2 * CAPACITY + 1)]
    run_on_device(cupy, kernels, Case(tuple(tensors), tensor_dtype, dtype))


@pytest.mark.parametrize("mix", mixes(), ids=lambda mix: mix.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_models(cupy: Any, kernels: CudaKernels, mix: Any, dtype: str) -> None:
    tensors = tuple(Tensor(size // 4) for size in mix.sizes)
    for packs in (True, False):
        run_on_device(cupy, kernels, Case(tensors, "float32", dtype, packs))


@pytest.mark.parametrize("pair", sorted(CASTS), ids="_".join)
def test_kernels_keep_to_registers(kernels: CudaKernels, pair: tuple[str, str]) -> None:
    function = kernels._module.get_function(f"wfbp_{kernel_name(*pair)}")
    assert function.local_size_bytes == 0
    assert function.max_threads_per_block >= THREADS


def test_packing_can_be_captured(cupy: Any, kernels: CudaKernels) -> None:
    """A stream that captures a graph forbids allocation, waiting, and synchronous copies."""
    sizes = [400, 4, 40_000]
    offsets, nbytes = plan_layout(sizes)
    values = [np.arange(size // 4, dtype=np.float32) for size in sizes]
    sources = [cupy.asarray(each) for each in values]
    buffer = cupy.zeros(nbytes, np.uint8)
    stream = cupy.cuda.Stream(non_blocking=True)
    table = DevicePackTable(kernels, buffer.data.ptr, nbytes, offsets, sizes, "float32", stream.ptr)
    table.pointers[:] = [source.data.ptr for source in sources]
    table.pack()  # loads the kernel, which a capture forbids
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        table.pack()
        graph = stream.end_capture()
    table.pointers[:] = 0  # the graph has its own
    buffer.fill(0)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    packed = cupy.asnumpy(buffer)
    for each, offset, size in zip(values, offsets, sizes, strict=True):
        found = packed[offset : offset + size].view(np.float32)
        np.testing.assert_array_equal(found, each)


def test_packing_waits_on_the_device_alone(cupy: Any, kernels: CudaKernels) -> None:
    """Packing runs behind what its stream waits for, and the host does not."""
    source = cupy.zeros(1 << 20, np.float32)
    buffer = cupy.zeros(4 << 20, np.uint8)
    producer = cupy.cuda.Stream(non_blocking=True)
    consumer = cupy.cuda.Stream(non_blocking=True)
    table = DevicePackTable(
        kernels, buffer.data.ptr, 4 << 20, [0], [4 << 20], "float32", consumer.ptr
    )
    table.pointers[:] = source.data.ptr
    table.pack()
    cupy.cuda.Device().synchronize()
    event = cupy.cuda.Event(disable_timing=True)
    dawdle = cupy.RawKernel(DAWDLE, "dawdle")
    with producer:
        dawdle((1,), (1,), (np.int64(2 * 10**8),))
        cupy.cuda.runtime.memsetAsync(source.data.ptr, 0x40, source.nbytes, producer.ptr)
        event.record(producer)
    consumer.wait_event(event)
    table.pack()
    assert not event.done, "the host has waited, or the producer was too quick"
    consumer.synchronize()
    assert set(cupy.asnumpy(buffer).tolist()) == {0x40}

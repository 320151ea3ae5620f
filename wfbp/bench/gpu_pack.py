"""Packing on a GPU, against one copy of the same bytes within its memory.

The contestants take turns round by round. Each is enqueued many times between two events of the
device, so that a call costs whatever is longer: its work, or its launch from Python.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from wfbp.bench.pack import Mix, resnet50_sizes
from wfbp.core.plan import layout
from wfbp.core.types import item_bytes
from wfbp.cuda.kernels import CudaKernels
from wfbp.cuda.pack import DevicePackTable

ROUND_MS = 2.0

COPY = "device copy, one piece"
PACK = "wfbp, pack"
UNPACK = "wfbp, unpack"

LARGE = Mix("100 MB in 160 tensors", (625_000,) * 160)
TINY = Mix("107 tiny tensors", tuple(size for size in resnet50_sizes() if size <= 8192))
MIXES = (LARGE, Mix("ResNet-50, 161 tensors", tuple(resnet50_sizes())), TINY)


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call over the rounds.

    Args:
        mix: name of what was packed.
        nbytes: its bytes.
        way: who packed it.
        median_us: of the rounds.
        spread_us: between the first and the third quartile.
        of_copy: the way's time over the copy's, median of the rounds' ratios.
    """

    mix: str
    nbytes: int
    way: str
    median_us: float
    spread_us: float
    of_copy: float


def measure(rounds: int) -> list[Timing]:
    """Check and time every way to pack every mix, on the current device."""
    import cupy

    kernels = CudaKernels()
    timings = []
    for mix in MIXES:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            samples = _time(cupy, _ways(cupy, kernels, mix, stream), stream, rounds)
        for way, values in samples.items():
            first, median, third = statistics.quantiles(values, n=4)
            of_copy = statistics.median(
                value / copy for value, copy in zip(values, samples[COPY], strict=True)
            )
            timings.append(Timing(mix.name, sum(mix.sizes), way, median, third - first, of_copy))
    return timings


def _ways(
    cupy: Any, kernels: CudaKernels, mix: Mix, stream: Any
) -> dict[str, Callable[[], object]]:
    """Ways to fill or empty a buffer on a stream, each checked."""
    offsets, nbytes = layout(mix.sizes)
    # Numbers come from the host: CuPy's own would need more of the CUDA toolkit than we do.
    random = np.random.default_rng(0)
    values = [random.standard_normal(size // 4, np.float32) for size in mix.sizes]
    sources = [cupy.asarray(each) for each in values]
    buffer, whole = cupy.zeros(nbytes, np.uint8), cupy.zeros(nbytes, np.uint8)

    def table(dtype: str) -> DevicePackTable:
        narrow = 4 // item_bytes(dtype)
        filled = DevicePackTable(
            kernels,
            buffer.data.ptr,
            nbytes,
            offsets,
            [size // narrow for size in mix.sizes],
            dtype,
            stream.ptr,
            "float32",
        )
        filled.pointers[:] = [source.data.ptr for source in sources]
        return filled

    packing, casting = table("float32"), table("bfloat16")
    packing.pack()
    for source in sources:
        source.fill(0)
    packing.unpack()
    for source, expected in zip(sources, values, strict=True):
        if not np.array_equal(cupy.asnumpy(source), expected):
            raise RuntimeError(f"{mix.name}: what was packed and unpacked is not what it was")
    kind = cupy.cuda.runtime.memcpyDeviceToDevice
    to, origin = buffer.data.ptr, whole.data.ptr
    return {
        COPY: lambda: cupy.cuda.runtime.memcpyAsync(to, origin, nbytes, kind, stream.ptr),
        PACK: packing.pack,
        UNPACK: packing.unpack,
        "wfbp, pack, scaled by 0.5": lambda: packing.pack(0.5),
        "wfbp, pack, to bfloat16": casting.pack,
        "wfbp, unpack, from bfloat16": casting.unpack,
        **_torch_ways(sources, buffer, offsets, mix, stream),
    }


def _torch_ways(
    sources: list[Any], buffer: Any, offsets: tuple[int, ...], mix: Mix, stream: Any
) -> dict[str, Callable[[], object]]:
    """What PyTorch offers for the same."""
    import torch

    slots = [
        torch.as_tensor(buffer[offset : offset + size].view(np.float32), device="cuda")
        for offset, size in zip(offsets, mix.sizes, strict=True)
    ]
    tensors = [torch.as_tensor(source, device="cuda") for source in sources]
    on_stream = torch.cuda.ExternalStream(stream.ptr)  # type: ignore[no-untyped-call]

    def foreach_copy() -> None:
        with torch.cuda.stream(on_stream):
            torch._foreach_copy_(slots, tensors)

    return {"torch._foreach_copy_": foreach_copy}


def _time(
    cupy: Any, ways: dict[str, Callable[[], object]], stream: Any, rounds: int
) -> dict[str, list[float]]:
    """Microseconds per call of every way in every round."""

    def microseconds(way: Callable[[], object], calls: int) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        for _ in range(calls):
            way()
        end.record(stream)
        end.synchronize()
        return 1e3 * float(cupy.cuda.get_elapsed_time(start, end)) / calls

    calls = {}
    for name, way in ways.items():
        way()
        calls[name] = max(1, math.ceil(1e3 * ROUND_MS / microseconds(way, 5)))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            samples[name].append(microseconds(way, calls[name]))
    return samples

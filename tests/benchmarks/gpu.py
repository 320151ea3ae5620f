"""``python -m tests.benchmarks gpu``: packing and training on one CUDA device.

Three parts. `pack` fills and empties fusion buffers, and compares with a copy of the same bytes.
`one` is a single rank that exchanges with itself by NCCL: it compares wfbp with the bare optimizer,
and with PyTorch DDP, which does the same. In `two`, two ranks share the device. Every schedule must
train what a plain all-reduce on the host trains, and is timed against DDP, whose ranks share it in
the same way. Sharing a device is for correctness: its times say nothing about two devices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.jobs import document_of
from tests.benchmarks.machine import environment
from tests.benchmarks.pack import Mix, resnet50_sizes
from tests.benchmarks.turns import Step, Timing, samples
from tests.benchmarks.turns import ratio as ratio_of
from wfbp.cli.tables import print_table
from wfbp.core.plan import layout
from wfbp.core.planners import PLANNERS
from wfbp.core.types import item_bytes
from wfbp.cuda.pack import CudaKernels, DevicePackTable

ROUND_S = 2e-3

COPY = "device copy, one piece"
PACK = "wfbp, pack"
UNPACK = "wfbp, unpack"

LARGE = Mix("100 MB in 160 tensors", (625_000,) * 160)
TINY = Mix("107 tiny tensors", tuple(n for n in resnet50_sizes() if n <= 8192))
MIXES = (LARGE, Mix("ResNet-50, 161 tensors", resnet50_sizes()), TINY)


def measure(rounds: int) -> list[dict[str, Any]]:
    """Check and time every way to pack every mix, on the current device; microseconds per call."""
    import cupy

    kernels = CudaKernels()
    timings = []
    for mix in MIXES:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            ways = _ways(cupy, kernels, mix, stream)
            times = samples(ways, rounds, ROUND_S, partial(_on_device, cupy, stream))
        for way, values in times.items():
            median, _, spread = (1e6 * seconds for seconds in Timing.of(values))
            row = {"mix": mix.name, "nbytes": sum(mix.sizes), "way": way, "median_us": median}
            timings.append(row | {"spread_us": spread, "of_copy": ratio_of(times, way, COPY)})
    return timings


def _on_device(cupy: Any, stream: Any, way: Step, calls: int) -> float:
    """Seconds per call, by the device's clock."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record(stream)
    for _ in range(calls):
        way()
    end.record(stream)
    end.synchronize()
    return 1e-3 * float(cupy.cuda.get_elapsed_time(start, end)) / calls


def _ways(cupy: Any, kernels: CudaKernels, mix: Mix, stream: Any) -> dict[str, Step]:
    """Ways to fill or empty a buffer on a stream, each checked."""
    offsets, nbytes = layout(mix.sizes)
    # Numbers come from the host: CuPy's own would need more of the CUDA toolkit than we do.
    random = np.random.default_rng(0)
    values = [random.standard_normal(size // 4, np.float32) for size in mix.sizes]
    sources = [cupy.asarray(each) for each in values]
    addresses = tuple(source.data.ptr for source in sources)
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
        filled.pointers[:] = addresses
        return filled

    def pointed(filled: DevicePackTable, act: Step) -> Step:
        """As in a step whose gradients lie elsewhere than those of the step before."""

        def run() -> None:
            filled.pointers[:] = np.fromiter(addresses, np.int64, len(addresses))
            act()

        return run

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
        PACK: pointed(packing, packing.pack),
        UNPACK: pointed(packing, packing.unpack),
        "wfbp, pack, same addresses": packing.pack,
        "wfbp, pack, to bfloat16": casting.pack,
        "wfbp, unpack, from bfloat16": casting.unpack,
        **_torch_ways(sources, buffer, offsets, mix, stream),
    }


def _torch_ways(
    sources: list[Any], buffer: Any, offsets: tuple[int, ...], mix: Mix, stream: Any
) -> dict[str, Step]:
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


ALONE, DDP, AUTO = TIMED = ("none", "ddp-25", "wfbp-auto")
PARTS = ("pack", "one", "two")
MODELS = ("resnet50", "gpt")
REHEARSED = "mlp-tiny"
TIMEOUT_S = 1800
PACKAGES = ("wfbp", "torch", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def main(words: Sequence[str]) -> int:
    """Run the parts, print tables; exit status 1 where it could not."""
    options = arguments(words)
    missing = "" if options.rehearse else lacking()
    if missing:
        print(f"tests.benchmarks gpu: {missing}", file=sys.stderr)
        return 1
    document: dict[str, Any] = {"benchmark": "gpu", "pack": [], "training": []}
    document["machine"] = {} if options.rehearse else machine()

    def write() -> None:
        if options.json:
            Path(options.json).write_text(json.dumps(document, indent=2))

    if "pack" in options.parts and not options.rehearse:
        timings = measure(options.rounds)
        show_timings(timings)
        document["pack"] = timings
        write()
    failed = False
    for part, num_ranks in (("one", 1), ("two", 2)):
        for model in options.models if part in options.parts else ():
            training = train(model, num_ranks, options)
            if training is None:
                failed = True
                continue
            show_training(training)
            document["training"].append(training)
            write()
    return int(failed)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=30, help="per contestant (default: 30)")
    parser.add_argument("--json", help="file for all that was measured, written after each part")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="train a tiny model on the CPU instead: shows that the ranks start and agree",
    )
    options = parser.parse_args(words)
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}: expected at least 2")
    if options.rehearse:
        options.models = [REHEARSED]
    return options


def lacking() -> str:
    """What is missing for a run on a GPU; empty where nothing is."""
    for package in ("cupy", "torch"):
        if find_spec(package) is None:
            return f"{package} is not installed: pip install 'wfbp[cuda12,torch]' (or cuda13)"
    import cupy
    import torch

    if not cupy.cuda.is_available():
        return "CuPy finds no CUDA device; this benchmark needs one"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device: install a build of it for CUDA"
    return ""


def train(model: str, num_ranks: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measurements of one model by ranks; None where they failed (they have said why)."""
    names: Iterable[str] = TIMED
    if num_ranks > 1:
        names = dict.fromkeys([DDP, AUTO, *(f"wfbp-{schedule}" for schedule in PLANNERS)])
        model = model if options.rehearse else f"{model}-small"
    device = "cpu" if options.rehearse else "cuda"
    words = ["-m", "tests.benchmarks.gpu_worker", model, ",".join(names)]
    variables = {"WFBP_EXCHANGE_ALONE": "1"}  # else a single rank would exchange nothing
    if options.rehearse:
        variables["WFBP_TRIAL_STEPS"] = "1"
    return document_of(
        [*words, str(options.rounds), device],
        ranks=num_ranks,
        variables=variables,
        timeout_s=TIMEOUT_S,
    )


def machine() -> dict[str, str]:
    """The device and its software."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "gpu": properties["name"].decode(),
        "driver": str(cupy.cuda.runtime.driverGetVersion()),
        "cuda": str(cupy.cuda.runtime.runtimeGetVersion()),
        **environment(*PACKAGES),
    }


def show_timings(timings: Sequence[dict[str, Any]]) -> None:
    """A table per mix."""
    for mix in dict.fromkeys(timing["mix"] for timing in timings):
        mine = [timing for timing in timings if timing["mix"] == mix]
        print_table(
            f"{mix}, {mine[0]['nbytes'] / 1e6:.2f} MB",
            ("<way", "median us", "spread", "GB/s", "of copy's time"),
            [
                (
                    timing["way"],
                    f"{timing['median_us']:.1f}",
                    f"{timing['spread_us']:.1f}",
                    f"{timing['nbytes'] / timing['median_us'] / 1e3:.0f}",
                    f"{timing['of_copy']:.2f}",
                )
                for timing in mine
            ],
        )


def ratio(seconds: dict[str, list[float]], name: str, other: str) -> str:
    """A contestant's step over another's, if that competes."""
    return f"{ratio_of(seconds, name, other):.3f}" if other in seconds else "-"


def show_training(training: dict[str, Any]) -> None:
    """A table of a model's contestants."""
    seconds = training["seconds"]
    rows = [
        (
            name,
            f"{1e3 * statistics.median(times):.2f}",
            ratio(seconds, name, ALONE),
            ratio(seconds, name, DDP),
        )
        for name, times in seconds.items()
    ]
    ranks = "one rank" if training["ranks"] == 1 else f"{training['ranks']} ranks on one device"
    headings = ("<contestant", "median ms", "of bare", "of DDP")
    print_table(f"{training['title']}, {ranks}", headings, rows)

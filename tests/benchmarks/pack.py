"""``python -m tests.benchmarks pack``: filling a fusion buffer, against memcpy.

The contestants take turns round by round, so that foreign load meets them all; each round runs
one contestant for about a millisecond or one call, whichever is longer. *memcpy* copies the same
number of bytes in one piece: what no packing of separate tensors can be expected to beat (but
large buffers can: see ``csrc/pack_table.h`` on streaming).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tests.benchmarks.machine import environment, print_facts
from wfbp import native
from wfbp.core.plan import layout

ROUND_S = 1e-3

MEMCPY = "memcpy, one piece"


@dataclass(frozen=True, slots=True)
class Mix:
    """Sizes in bytes of the tensors of one fusion buffer."""

    name: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call over the rounds, and speed against memcpy.

    Args:
        spread_us: between the first and the third quartile.
        speed: memcpy's time over this one's, median of the rounds' ratios.
    """

    median_us: float
    least_us: float
    spread_us: float
    speed: float


def resnet50_sizes() -> Iterator[int]:
    """Bytes of ResNet-50's 161 parameters: convolutions, two per batch norm, the classifier."""

    def convolution(inputs: int, outputs: int, kernel: int) -> list[int]:
        return [inputs * outputs * kernel * kernel, outputs, outputs]

    numels = convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            numels += convolution(inputs, width, 1) + convolution(width, width, 3)
            numels += convolution(width, 4 * width, 1)
            if block == 0:
                numels += convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    numels += [2048 * 1000, 1000]
    return (4 * numel for numel in numels)


def mixes() -> list[Mix]:
    """A whole model in one buffer, a buffer of usual size, and the small tensors of a model."""
    model = tuple(resnet50_sizes())
    return [
        Mix("ResNet-50, 161 tensors", model),
        Mix("160 equal tensors", (32768,) * 160),
        Mix("ResNet-50, its 107 small tensors", tuple(s for s in model if s <= 8192)),
    ]


def contestants(mix: Mix) -> dict[str, Callable[[], object]]:
    """Ways to fill the same buffer, each checked to give the same bytes."""
    offsets, nbytes = layout(mix.sizes)
    random = np.random.default_rng(0)
    # Ordinary values: arithmetic on random bits would meet subnormals, which are slow.
    sources = [random.standard_normal(size // 4, np.float32).view(np.uint8) for size in mix.sizes]
    destination = np.zeros(nbytes, np.uint8)
    slots = [destination[o : o + s] for o, s in zip(offsets, mix.sizes, strict=True)]
    whole = np.ones(nbytes, np.uint8)
    to, source = (array.ctypes.data_as(ctypes.c_void_p) for array in (destination, whole))

    def memcpy() -> None:  # the pointers made by data_as keep their arrays alive
        ctypes.memmove(to, source, nbytes)

    def per_tensor() -> None:
        for slot, tensor in zip(slots, sources, strict=True):
            np.copyto(slot, tensor)

    def table() -> native.PackTable:
        filled = native.PackTable(destination, offsets, mix.sizes, "float32")
        filled.pointers[:] = [tensor.ctypes.data for tensor in sources]
        return filled

    ways: dict[str, Callable[[], object]] = {
        "numpy.copyto per tensor": per_tensor,
        "wfbp": table().pack,
    }
    per_tensor()
    expected = destination.copy()
    for name, way in ways.items():
        destination[:] = 0
        way()
        if not np.array_equal(destination, expected):
            raise RuntimeError(f"{name} packed something else than numpy.copyto did")
    return {MEMCPY: memcpy, **ways}


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time the contestants in turns."""
    calls = {}
    for name, way in ways.items():
        way()
        calls[name] = max(1, round(ROUND_S / seconds(way, 3)))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            samples[name].append(1e6 * seconds(way, calls[name]))
    timings = {}
    for name, values in samples.items():
        first, median, third = statistics.quantiles(values, n=4)
        ratios = [m / v for m, v in zip(samples[MEMCPY], values, strict=True)]
        timings[name] = Timing(median, min(values), third - first, statistics.median(ratios))
    return timings


def seconds(way: Callable[[], object], calls: int) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - start) / calls


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks pack", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="per contestant (default: 200)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 2:
        parser.error(f"--rounds is {arguments.rounds}: expected at least 2")
    facts = environment() | {"kernels": native.INSTRUCTIONS}
    results = [(mix, measure(contestants(mix), arguments.rounds)) for mix in mixes()]
    if arguments.json:
        rows = [
            {
                "mix": mix.name,
                "tensors": len(mix.sizes),
                "nbytes": sum(mix.sizes),
                "results": {name: asdict(timing) for name, timing in timings.items()},
            }
            for mix, timings in results
        ]
        print(json.dumps({"benchmark": "pack", "machine": facts, "mixes": rows}, indent=2))
        return 0
    print_facts(facts)
    for mix, timings in results:
        print(f"\n{mix.name}, {sum(mix.sizes) / 1e6:.2f} MB")
        print(f"  {'us per call':<26}{'median':>10}{'least':>10}{'spread':>10}{'of memcpy':>11}")
        for name, t in timings.items():
            times = f"{t.median_us:>10.1f}{t.least_us:>10.1f}{t.spread_us:>10.1f}"
            print(f"  {name:<26}{times}{t.speed:>10.2f}x")
    return 0

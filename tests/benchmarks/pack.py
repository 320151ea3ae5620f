"""``python -m tests.benchmarks pack``: filling a fusion buffer, against memcpy.

Each round runs one contestant for about a millisecond or one call, whichever is longer. *memcpy*
copies the same number of bytes in one piece: what no packing of separate tensors can be expected to
beat (but large buffers can: see ``csrc/pack_table.h`` on streaming).
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tests.benchmarks.machine import environment, print_facts
from tests.benchmarks.turns import Step, Timing, ratio, samples
from wfbp import native
from wfbp.cli.inputs import EXAMPLE_TRACES
from wfbp.cli.tables import print_table
from wfbp.core.plan import layout
from wfbp.core.trace import Trace

MEMCPY = "memcpy, one piece"


@dataclass(frozen=True, slots=True)
class Mix:
    """Sizes in bytes of the tensors of one fusion buffer."""

    name: str
    sizes: tuple[int, ...]


def resnet50_sizes() -> tuple[int, ...]:
    """Bytes of ResNet-50's 161 parameters."""
    return tuple(spec.nbytes for spec in Trace.load(EXAMPLE_TRACES / "resnet-50.json").specs)


def mixes() -> list[Mix]:
    """A whole model in one buffer, a buffer of usual size, and the small tensors of a model."""
    model = resnet50_sizes()
    return [
        Mix("ResNet-50, 161 tensors", model),
        Mix("160 equal tensors", (32768,) * 160),
        Mix("ResNet-50, its 107 small tensors", tuple(s for s in model if s <= 8192)),
    ]


def contestants(mix: Mix) -> dict[str, Step]:
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

    table = native.PackTable(destination, offsets, mix.sizes, "float32")
    table.pointers[:] = [tensor.ctypes.data for tensor in sources]
    per_tensor()
    expected = destination.copy()
    destination[:] = 0
    table.pack()
    if not np.array_equal(destination, expected):
        raise RuntimeError("wfbp packed something else than numpy.copyto did")
    return {
        MEMCPY: memcpy,
        "numpy.copyto per tensor": per_tensor,
        "wfbp": table.pack,
    }


def main(argv: Sequence[str]) -> None:
    """Measure, and print a table of each mix."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks pack", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="per contestant (default: 200)")
    rounds = parser.parse_args(argv).rounds
    if rounds < 2:
        parser.error(f"--rounds is {rounds}: expected at least 2")
    for mix in mixes():
        times = samples(contestants(mix), rounds)
        rows = [
            (
                name,
                *(f"{1e6 * s:.1f}" for s in Timing.of(mine)),
                f"{ratio(times, MEMCPY, name):.2f}",
            )
            for name, mine in times.items()
        ]
        headings = ("<us per call", "median", "least", "spread", "speed over memcpy's")
        print_table(f"{mix.name}, {sum(mix.sizes) / 1e6:.2f} MB", headings, rows)
    print_facts(environment() | {"kernels": native.INSTRUCTIONS})

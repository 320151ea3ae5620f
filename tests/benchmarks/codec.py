"""``python -m tests.benchmarks codec``: encoding gradients for sending, and decoding them.

One thread encodes float32 elements, and decodes them, with each set of kernels. The
ways take turns, and each tells its best round: GB of float32 per second, beside ``np.copyto``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np

from tests.benchmarks.machine import environment, print_facts
from tests.benchmarks.turns import Step, samples
from wfbp import native
from wfbp.cli.tables import print_table
from wfbp.core.types import CODECS, TensorSpec

SIZES = (256 << 10, 16 << 20)
"""Bytes of float32."""
ROUNDS, ROUND_S = 9, 1e-3


def ways(nbytes: int, codec: str) -> dict[str, Step]:
    """Functions to time, on arrays of so many bytes of float32."""
    source = np.random.default_rng(0).standard_normal(nbytes // 4, np.float32)
    out, total, error = np.zeros((3, source.size), np.float32)
    spec = TensorSpec("gradient", source.shape, "float32")
    wire = np.zeros(spec.wire_bytes(codec), np.uint8)
    return {
        "memcpy": lambda: np.copyto(out, source),
        "encode, keeping errors": lambda: native.encode(source, wire, codec, error),
        "encode": lambda: native.encode(source, wire, codec),
        "decode": lambda: native.decode(wire, out, codec),
        "decode, adding": lambda: native.decode(wire, total, codec, adds=True),
    }


def measure(nbytes: int, instructions: str, codec: str) -> dict[str, float]:
    """The best GB/s of each way with these kernels."""
    native.use_instructions(instructions)
    try:
        times = samples(ways(nbytes, codec), ROUNDS, ROUND_S)
    finally:
        native.use_instructions(native.INSTRUCTIONS)
    return {name: nbytes / min(seconds) / 1e9 for name, seconds in times.items()}


def main(argv: Sequence[str]) -> int:
    """Measure, and print tables or JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks codec", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    kernels = dict.fromkeys(["portable", native.INSTRUCTIONS])
    rows = [
        {"codec": codec, "kernels": name, "nbytes": size, "gb_per_s": measure(size, name, codec)}
        for codec in CODECS
        for size in SIZES
        for name in kernels
    ]
    if arguments.json:
        print(json.dumps({"benchmark": "codec", "machine": environment(), "rows": rows}))
        return 0
    for row in rows:
        speeds = row["gb_per_s"]
        print_table(
            f"{row['codec']}, {row['nbytes'] >> 10} KiB, {row['kernels']} kernels",
            ("<way", "GB/s", "of memcpy"),
            [(name, f"{s:.2f}", f"{s / speeds['memcpy']:.2f}") for name, s in speeds.items()],
        )
    print_facts(environment())
    return 0

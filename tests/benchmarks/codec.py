"""``python -m tests.benchmarks codec``: encoding gradients for sending, and decoding them.

One thread encodes float32 elements, and decodes them, with each set of kernels. The
ways take turns, and each tells its best round: GB of float32 per second, beside ``np.copyto``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import numpy as np

from tests.benchmarks.machine import environment, print_facts
from tests.benchmarks.pack import ROUND_S, seconds
from wfbp import native
from wfbp.core.types import CODECS, TensorSpec

SIZES = (256 << 10, 16 << 20)
"""Bytes of float32."""
ROUNDS = 9


def ways(nbytes: int, codec: str) -> dict[str, Callable[[], object]]:
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
        timed = ways(nbytes, codec)
        calls = {name: max(1, round(ROUND_S / seconds(way, 3))) for name, way in timed.items()}
        best = dict.fromkeys(timed, 0.0)
        for _ in range(ROUNDS):
            for name, way in timed.items():
                best[name] = max(best[name], nbytes / seconds(way, calls[name]) / 1e9)
        return best
    finally:
        native.use_instructions(native.INSTRUCTIONS)


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or JSON."""
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
    facts = environment()
    if arguments.json:
        print(json.dumps({"benchmark": "codec", "machine": facts, "rows": rows}, indent=2))
        return 0
    print_facts(facts)
    for row in rows:
        print(f"\n{row['codec']}, {row['nbytes'] >> 10} KiB, {row['kernels']} kernels")
        print(f"  {'':<26}{'GB/s':>10}{'of memcpy':>11}")
        for name, speed in row["gb_per_s"].items():
            print(f"  {name:<26}{speed:>10.2f}{speed / row['gb_per_s']['memcpy']:>10.2f}x")
    return 0

"""Mixed asynchronous operations of torch.distributed on overlapping groups, waited for at random.

    mpirun -np 4 python -m tests.benchmarks stress [--operations 10000]

Checks every result, and that memory does not grow after the first tenth.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parallel.programs.torch.process_groups import stress
from wfbp.torch.distributed import register

MOST_GROWTH_BYTES = 16 << 20


def main(argv: Sequence[str]) -> int:
    """Run; fail if memory grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks stress", description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000)
    arguments = parser.parse_args(argv)
    register()
    torch.set_num_threads(1)
    dist.init_process_group("wfbp", timeout=timedelta(minutes=2))
    rank, size = dist.get_rank(), dist.get_world_size()
    begin_s = time.perf_counter()
    stress(rank, size, arguments.operations // 10)
    before = _resident_bytes()
    for _ in range(9):
        stress(rank, size, arguments.operations // 10)
    grown = _resident_bytes() - before
    took_s = time.perf_counter() - begin_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    if rank == 0:
        print(
            f"{arguments.operations} operations, {size} ranks: correct, {took_s:.1f} s; "
            f"rank 0 grew by {grown / 2**20:.1f} MiB, peak {peak} MiB"
        )
    dist.destroy_process_group()
    return int(grown > MOST_GROWTH_BYTES)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()

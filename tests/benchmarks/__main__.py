"""``python -m tests.benchmarks NAME ...``: run a benchmark by its name."""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = {
    "pack": "fusion buffers filled by the extension, by NumPy, and by memcpy",
    "codec": "gradients encoded and decoded, by set of kernels, beside memcpy",
    "accuracy": "losses after training with fewer bytes per gradient",
    "hooks": "cost of a gradient hook on the training thread",
    "observing": "what the timeline, statistics and lines of log cost a step",
    "plan": "time to plan, by planner and number of tensors",
    "answer": "time of wfbp plan as a whole process, by schedule and kind of cost",
    "scaling": "every schedule from 4 to 2048 workers, and the time to predict it",
    "validation": "the model against published measurements and claims",
    "comm": "collectives of the MPI backend: latency, bandwidth, CPU use",
    "operations": "round trips of named operations, and what idle ranks cost",
    "training": "whole iterations against other ways of data-parallel training",
    "peers": "wfbp, DDP, Horovod and plain MPI: table and picture of the front page",
    "papers": "published schedules on eight ranks, beside what the papers report",
    "regret": "how much slower auto ends than the best fixed schedule, in fresh starts",
    "jax": "iterations of jitted steps against other ways; overlap; cost per leaf",
    "memory": "optimizer state and peak memory with sharded updates",
    "gpu": "packing and training on a CUDA device",
    "halves": "gradients in 16 bits, against DDP's hook",
    "backend": "DDP, FSDP2 and collectives of torch.distributed by wfbp, against gloo",
    "upstream": "PyTorch's own tests of its process groups, under gloo and under wfbp",
    "stress": "10,000 asynchronous operations on overlapping groups of torch.distributed",
    "hosts": "collectives of hosts with several ranks each, on two levels and without",
    "ranks": "many ranks on one machine: start, probe, first plan, memory",
    "replay": "the real runtime on a trace and an emulated link, against the prediction",
}
"""What each does; ``main(argv)`` of the module of that name runs it."""


def main() -> int:
    """Hand the rest of the command line to the benchmark that the first word names."""
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print("usage: python -m tests.benchmarks NAME [--help] ...", file=sys.stderr)
        for name, purpose in BENCHMARKS.items():
            print(f"  {name:<10} {purpose}", file=sys.stderr)
        return 2
    # Imported only now: a benchmark may need a framework that others do without.
    status: int | None = import_module(f"tests.benchmarks.{sys.argv[1]}").main(sys.argv[2:])
    return status or 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""A training script on ranks that Ray places in its cluster.

    python launch/ray_job.py -n 4 train.py --epochs 10
    ray job submit --working-dir . -- python launch/ray_job.py -n 4 --gpus 1 train.py --epochs 10

Without ``RAY_ADDRESS`` and outside of a cluster, Ray starts one of this machine alone.
"""

from __future__ import annotations

import argparse
import runpy
import sys

from wfbp.integrations.ray import run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, required=True, metavar="RANKS", help="number of ranks")
    parser.add_argument("--cpus", type=float, default=1.0, help="cores for each (%(default)s)")
    parser.add_argument("--gpus", type=float, default=0.0, help="GPUs for each (%(default)s)")
    parser.add_argument("--spread", action="store_true", help="over as many nodes as there are")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script, and its arguments")
    options = parser.parse_args()
    if not options.program:
        parser.error("name a script")

    def script(words: list[str]) -> None:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

    run(
        script,
        options.program,
        num_ranks=options.n,
        cpus_per_rank=options.cpus,
        gpus_per_rank=options.gpus,
        strategy="SPREAD" if options.spread else "PACK",
    )


if __name__ == "__main__":
    main()

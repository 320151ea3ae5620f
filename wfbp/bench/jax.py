"""``python -m wfbp.bench jax``: iteration times of wfbp.jax and its peers, interleaved.

At two ranks with one compute thread each, on JAX versions of two of the training benchmark's
models, over shared memory or an emulated link: no communication; one flat MPI all-reduce between
backward and update; mpi4jax's all-reduce within the program, per leaf and flat (where mpi4jax is
installed); JAX's own processes with gloo, shard_map and psum; and wfbp with each schedule.
Parameters are compared before anything is timed; iterations during which others used the machine
are dropped.

``--overlap`` and ``--leaf`` measure one process on a link that exists only as a cost: how much of
the communication backward hides, and what announcing a gradient costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wfbp.bench.jax_contestants import CONTESTANTS, FLAT
from wfbp.bench.jax_models import MODELS
from wfbp.bench.jax_table import model_table, target_table
from wfbp.bench.training import add_arguments, completed, run_models
from wfbp.bench.training_results import ModelResult, document

ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def main(words: Sequence[str]) -> int:
    """Run what the flags ask for; exit status."""
    options = arguments(words)
    if options.overlap:
        from wfbp.bench import jax_overlap

        return jax_overlap.main(options.folder, options.iterations)
    if options.leaf:
        from wfbp.bench import jax_leaf

        return jax_leaf.main(options.iterations)
    variables = {"XLA_FLAGS": ONE_THREAD, "JAX_PLATFORMS": "cpu"}
    return run_models(options, "jax_worker", (model_table, target_table, _document), variables)


def _document(results: Sequence[ModelResult]) -> dict[str, Any]:
    found = document(results)
    for package in ("jax", "jaxlib", "mpi4jax"):
        try:
            found["environment"][package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line; names are checked, and the reference is always among the contestants."""
    parser = argparse.ArgumentParser(prog="python -m wfbp.bench jax", description=__doc__)
    add_arguments(parser, MODELS, CONTESTANTS, list(CONTESTANTS), warm_up_steps=1000)
    parser.add_argument("--overlap", action="store_true", help="how much backward hides")
    parser.add_argument("--folder", type=Path, help="with --overlap: where the timeline goes")
    parser.add_argument("--leaf", action="store_true", help="what announcing a gradient costs")
    return completed(parser.parse_args(words), CONTESTANTS, FLAT)

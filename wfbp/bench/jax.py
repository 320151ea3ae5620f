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
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from wfbp.bench.jax_contestants import CONTESTANTS, FLAT
from wfbp.bench.jax_models import MODELS
from wfbp.bench.jax_table import model_table, target_table
from wfbp.bench.training import (
    LINK_INTERFACE,
    LINKS,
    TABLE_WIDTH,
    launch_command,
    names,
    rank_environment,
)
from wfbp.bench.training_results import ModelResult, document
from wfbp.bench.training_settings import Settings

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
    results: list[ModelResult] = []
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    for model in options.models:
        result = run_model(model, options)
        if result is None:
            return 1
        results.append(result)
        console.print(model_table(result))
        if options.json:
            Path(options.json).write_text(json.dumps(_document(results)))
    console.print(target_table(results))
    return 0


def run_model(model: str, options: argparse.Namespace) -> ModelResult | None:
    """Start the ranks for one model; None where they failed (they have said why)."""
    with tempfile.TemporaryDirectory(prefix="wfbp-bench-") as directory:
        result = Path(directory) / "result.json"
        file = Path(directory) / "settings.json"
        Settings(
            model=model,
            contestants=tuple(options.contestants),
            iterations=options.iterations,
            patience=options.patience,
            max_foreign_cores=options.max_foreign,
            warm_up_steps=options.warm_up_steps,
            link=options.link,
            interface="" if options.link == "none" else LINK_INTERFACE,
            result=str(result),
        ).save(file)
        worker = [sys.executable, "-m", "wfbp.bench.jax_worker", str(file)]
        command = [*launch_command(options.link, options.np), *worker]
        environment = rank_environment() | {"XLA_FLAGS": ONE_THREAD, "JAX_PLATFORMS": "cpu"}
        status = subprocess.run(command, env=environment, check=False).returncode
        if status or not result.exists():
            print(f"{model}: failed with status {status}: {shlex.join(command)}", file=sys.stderr)
            return None
        return ModelResult.from_json(json.loads(result.read_text()))


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
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS))
    parser.add_argument("--contestants", type=names(CONTESTANTS), default=list(CONTESTANTS))
    parser.add_argument("--iterations", type=int, default=40, help="to keep, per contestant")
    parser.add_argument("--link", choices=LINKS, default="none", help="none: shared memory")
    parser.add_argument("--json", help="file for all samples")
    parser.add_argument("--np", type=int, default=2, help="number of ranks")
    parser.add_argument(
        "--max-foreign",
        type=float,
        help="drop blocks while others keep more cores busy (default 0.1; 0.2 over a link)",
    )
    parser.add_argument(
        "--patience", type=float, default=3.0, help="times the rounds that a quiet machine needs"
    )
    parser.add_argument("--warm-up-steps", type=int, default=1000, help="limit, per contestant")
    parser.add_argument("--overlap", action="store_true", help="how much backward hides")
    parser.add_argument("--folder", type=Path, help="with --overlap: where the timeline goes")
    parser.add_argument("--leaf", action="store_true", help="what announcing a gradient costs")
    options = parser.parse_args(words)
    if options.max_foreign is None:
        # Interrupts of our own traffic on an otherwise idle core look foreign.
        options.max_foreign = 0.1 if options.link == "none" else 0.2
    wanted = {*options.contestants, FLAT}
    options.contestants = [name for name in CONTESTANTS if name in wanted]
    return options

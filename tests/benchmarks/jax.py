"""``python -m tests.benchmarks jax``: iteration times of wfbp.jax and its peers, interleaved.

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

from rich.table import Table

from tests.benchmarks.harness import ContestantResult, Figures, ModelResult, document
from tests.benchmarks.jax_contestants import CONTESTANTS, FLAT, MODELS, NO_COMMUNICATION
from tests.benchmarks.training import add_arguments, completed, contestants_table, run_models

AUTO = "wfbp-auto"
COLUMNS = ("median ms", "IQR", "kept", "of best peer", "exposed ms", "CPU ms", "plan", "link MB")


def best_peer(figures: dict[str, Figures]) -> float | None:
    """The least median of those that are not wfbp and communicate; None where none ran."""
    peers = [f.median_s for n, f in figures.items() if not n.startswith("wfbp-")
             and n != NO_COMMUNICATION]  # fmt: skip
    return min(peers, default=None)


def model_table(result: ModelResult) -> Table:
    """One model's contestants: times, ratios, what communication adds, CPU use, bytes."""
    return contestants_table(result, COLUMNS, _cells)


def _cells(result: ModelResult, contestant: ContestantResult) -> list[str]:
    all_figures = result.figures()
    figures = all_figures.get(contestant.name)
    total = sum(len(block.iterations_s) for block in contestant.blocks)
    if figures is None:
        return ["-", "-", f"0/{total}"]
    best, alone = best_peer(all_figures), all_figures.get(NO_COMMUNICATION)
    report = contestant.report
    plan = f"{report['num_groups']} {report['schedule']}" if report.get("num_groups") else ""
    return [
        f"{figures.median_s * 1e3:.1f}",
        f"{figures.iqr_s * 1e3:.1f}",
        f"{figures.num_kept}/{total}",
        "" if best is None else f"{figures.median_s / best:.3f}",
        "" if alone is None else f"{(figures.median_s - alone.median_s) * 1e3:.1f}",
        f"{figures.cpu_s * 1e3:.1f}",
        plan,
        "" if figures.sent_bytes is None else f"{figures.sent_bytes / 1e6:.1f}",
    ]


def target_table(results: Sequence[ModelResult]) -> Table:
    """Whether ``auto`` is at most the fastest peer."""
    table = Table(title="targets")
    for name in ("model", "what", "measured", "at most", ""):
        table.add_column(name)
    for result in results:
        figures = result.figures()
        best = best_peer(figures)
        if best is None or AUTO not in figures:
            continue
        ratio = figures[AUTO].median_s / best
        verdict = "met" if ratio <= 1 else "missed"
        table.add_row(
            result.model,
            "auto over the fastest peer",
            f"{ratio:.3f}",
            "1",
            verdict if result.complete else "undecided",
        )
    return table


ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"


def main(words: Sequence[str]) -> int:
    """Run what the flags ask for; exit status."""
    options = arguments(words)
    if options.overlap:
        from tests.benchmarks import jax_overlap

        return jax_overlap.main(options.folder, options.iterations)
    if options.leaf:
        from tests.benchmarks import jax_leaf

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
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks jax", description=__doc__)
    add_arguments(parser, MODELS, CONTESTANTS, list(CONTESTANTS), warm_up_steps=1000)
    parser.add_argument("--overlap", action="store_true", help="how much backward hides")
    parser.add_argument("--folder", type=Path, help="with --overlap: where the timeline goes")
    parser.add_argument("--leaf", action="store_true", help="what announcing a gradient costs")
    return completed(parser.parse_args(words), CONTESTANTS, FLAT)

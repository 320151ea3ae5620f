"""``python -m tests.benchmarks papers``: the published schedules, measured beside their claims.

Eight ranks on four hosts (network namespaces, so it needs root) train one model over links of 1 and
10 Gbit/s with the schedules of the papers. All of them run in one set of processes and take turns.
Ratios of times are printed beside what each paper reports. No paper used this hardware or this
model, so a ratio shows the direction and the size of an effect, and confirms no number.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.benchmarks.jobs import names
from tests.benchmarks.models import MODELS
from tests.benchmarks.scaling import DATA
from tests.benchmarks.training import measure, medians, print_contestants, save
from tests.benchmarks.validation import updated
from tests.benchmarks.validation.tables import markdown
from wfbp.cli.tables import print_table

RANKS, HOSTS = 8, 4
LINKS = ("1gbit", "10gbit")
SCHEDULES = ("layerwise", "mgwfbp", "dear", "ps", "ps_layerwise", "ipart", "oasr")
CONTESTANTS = ("none", "mpi-per-tensor", *(f"wfbp-{name}" for name in SCHEDULES))


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


def measured(claim: Claim, document: Mapping[str, Any]) -> str:
    """The claim's ratio in this run: the median over rounds, with quartiles; the schedule it
    compares with, if there is a choice."""
    found, seconds = medians(document), document["seconds"]
    over = min(claim.over, key=lambda name: found[f"wfbp-{name}"])
    rounds = zip(seconds[f"wfbp-{claim.schedule}"], seconds[f"wfbp-{over}"], strict=True)
    ratios = [ours / theirs for ours, theirs in rounds]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    fastest = f" of {over}" if len(claim.over) > 1 else ""
    return f"{median(ratios):.2f} ({low:.2f}-{high:.2f}){fastest}"


def claim_rows(documents: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """The headings, and a row for each claim: a column for each run, and what was published."""
    rows = [["time over time", *documents, "published", "setup of the publication"]]
    for claim in CLAIMS:
        cells = [measured(claim, document) for document in documents.values()]
        label = f"{claim.schedule} / {' or '.join(claim.over)}"
        rows.append([label, *cells, claim.published, claim.setup])
    return rows


def main(words: Sequence[str]) -> int:
    """Run the model over each link and print all tables; exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks papers", description=__doc__)
    parser.add_argument("--models", type=names(MODELS), default=["mlp"])
    parser.add_argument("--links", type=names(LINKS), default=list(LINKS))
    parser.add_argument("--rounds", type=int, default=4, help="of all contestants, interleaved")
    parser.add_argument("--json", type=Path, help="file for all samples and ratios")
    parser.add_argument("--update", type=Path, metavar="PAGE", help="put the table into this page")
    options = parser.parse_args(words)
    if options.rounds < 2:
        parser.error(f"--rounds is {options.rounds}: expected at least 2")
    documents: dict[str, Mapping[str, Any]] = {}
    for model, link in product(options.models, options.links):
        job = (link, RANKS, HOSTS, {"WFBP_TRIAL_STEPS": "2"})
        document = measure(model, CONTESTANTS, options.rounds, *job)
        if document is None:
            return 1
        print_contestants(MODELS[model].title, document)
        documents[f"{MODELS[model].title.partition(',')[0]}, {link}/s"] = document
        if options.json:
            save(options.json, {"runs": documents, "claims": claim_rows(documents)})
    headings, *rows = claim_rows(documents)
    print_table(f"{RANKS} ranks on {HOSTS} hosts, beside publications", headings, rows)
    if options.update:
        table = {"papers": markdown(headings, rows)}
        options.update.write_text(updated(options.update.read_text(), table))
    return 0

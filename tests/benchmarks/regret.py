"""``python -m tests.benchmarks regret``: how much slower ``auto`` ends than the best schedule.

Every start is a separate job: ``auto`` measures, tries and installs a plan as in any training, the
fixed schedules install theirs, and then all are timed alternately, as in the training benchmark.
The *regret* of a start is the median iteration of ``auto`` over the best fixed schedule's. (The
least of several noisy medians is itself too low by chance, so a regret of 1.01 may be none.)

With ``--compression auto:int8`` the plan also chooses how gradients are sent, and its rivals are
``auto`` with each of the ways that it may choose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tests.benchmarks.models import MODELS
from tests.benchmarks.training import (
    AUTO,
    add_arguments,
    measure,
    medians,
    place,
    save,
)
from wfbp.cli.tables import print_table
from wfbp.core.planners import PLANNERS
from wfbp.core.types import AUTO_WIRES, COMPRESSIONS

LIMIT = 1.03
SHARE = 0.9
BASELINES = ("wfbp-ps", "wfbp-ps_layerwise")
"""For comparison only; ``auto`` does not consider them either."""
FIXED = [name for name in (f"wfbp-{s}" for s in PLANNERS) if name not in BASELINES]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of ``auto``.

    Args:
        model: key of the registry of models.
        auto_s: median iteration of ``auto``.
        plan: what it installed, in words.
        best: the fixed schedule with the least median.
        best_s: that median.
    """

    model: str
    auto_s: float
    plan: str
    best: str
    best_s: float

    @property
    def regret(self) -> float:
        """Time of ``auto`` over that of the best fixed schedule."""
        return self.auto_s / self.best_s

    @classmethod
    def of(cls, model: str, document: Mapping[str, Any], auto: str, others: Sequence[str]) -> Start:
        """From what the training benchmark measured."""
        found, report = medians(document), document["reports"][auto]
        best = min((name for name in found if name in others), key=lambda name: found[name])
        late = "" if report.get("overlap", True) else ", late"
        plan = f"{report['schedule']}, {report['num_groups']} groups{late}"
        if auto != AUTO:
            plan += f", {'/'.join(report['sent_as'])}"
        return cls(model, found[auto], plan, best.removeprefix("wfbp-"), found[best])


def main(words: Sequence[str]) -> int:
    """Start, measure, and print a table; exit status."""
    options = arguments(words)
    auto, others = AUTO, FIXED
    if options.compression:
        auto = f"{AUTO}/{options.compression}"
        wires = AUTO_WIRES[COMPRESSIONS[options.compression]]
        others = [f"{AUTO}/{name}" for name, wire in COMPRESSIONS.items() if wire in wires]
    starts: list[Start] = []
    for number in range(options.starts):
        for model in options.models:
            job = (options.link, options.np, options.hosts)
            document = measure(model, [*others, auto], options.rounds, *job)
            if document is None:
                return 1
            start = Start.of(model, document, auto, others)
            starts.append(start)
            print(
                f"start {number + 1}, {model}: {start.auto_s * 1e3:.1f} ms by auto ({start.plan}), "
                f"{start.best_s * 1e3:.1f} by {start.best}: regret {start.regret:.3f}",
                file=sys.stderr,
                flush=True,
            )
            if options.json:
                save(options.json, [{**asdict(each), "regret": each.regret} for each in starts])
    print_table(f"regret of auto, {place(options.link)}", *table(starts))
    return 0


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks regret", description=__doc__)
    parser.add_argument("--starts", type=int, default=1, help="fresh starts of auto per model")
    parser.add_argument("--compression", choices=[c for c in COMPRESSIONS if ":" in c])
    add_arguments(parser, MODELS, list(MODELS))
    return parser.parse_args(words)


def table(starts: Sequence[Start]) -> tuple[list[str], list[list[str]]]:
    """Headings, and rows: one for each model, and one for all."""
    headings = ["<model", "starts", "median", "largest", f"within {LIMIT}"]
    rows = []
    for model in dict.fromkeys(start.model for start in starts):
        its = [start for start in starts if start.model == model]
        times = (median(s.auto_s for s in its), median(s.best_s for s in its))
        bests = ", ".join(dict.fromkeys(start.best for start in its))
        rows.append([model, *_summary(its), *(f"{1e3 * t:.1f}" for t in times), bests])
    rows.append(["all", *_summary(starts), "", "", ""])
    return [*headings, "auto ms", "best ms", "<best"], rows


def _summary(starts: Sequence[Start]) -> list[str]:
    regrets = [start.regret for start in starts]
    share = sum(regret <= LIMIT for regret in regrets) / len(regrets)
    verdict = "" if share >= SHARE else " (missed)"
    return [
        str(len(regrets)),
        f"{median(regrets):.3f}",
        f"{max(regrets):.3f}",
        f"{share:.0%}{verdict}",
    ]

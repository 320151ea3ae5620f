"""``python -m tests.benchmarks regret``: how much slower ``auto`` ends than the best schedule.

Every start is a job of its own: ``auto`` measures, tries and installs a plan as in any training,
the fixed schedules install theirs, and then all are timed in turns, as in the training benchmark.
The *regret* of a start is the median iteration of ``auto`` over the best fixed schedule's. (The
least of several noisy medians is itself too low by chance, so a regret of 1.01 may be none.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import AUTO, ModelResult, environment
from tests.benchmarks.machine import print_table
from tests.benchmarks.torch_contestants import CONTESTANTS, MODELS, PER_TENSOR
from tests.benchmarks.training import LINKS, add_arguments, completed, run_model
from wfbp.core.planners import PLANNERS

FORMAT = "wfbp-bench-regret/1"
LIMIT = 1.03
SHARE = 0.9
BASELINES = ("wfbp-ps", "wfbp-ps_layerwise")
"""For comparison only; ``auto`` does not consider them either."""
FIXED = [name for name in (f"wfbp-{s}" for s in PLANNERS) if name not in BASELINES]


@dataclass(frozen=True, slots=True)
class Start:
    """What one start of ``auto`` came to.

    Args:
        model: key of the registry of models.
        link: rate of the link, or "none" for shared memory.
        auto_s: median iteration of ``auto``.
        plan: what it installed, in words.
        best: the fixed schedule with the least median.
        best_s: that median.
        fixed_s: the medians of all fixed schedules.
    """

    model: str
    link: str
    auto_s: float
    plan: str
    best: str
    best_s: float
    fixed_s: dict[str, float]

    @property
    def regret(self) -> float:
        """Time of ``auto`` over that of the best fixed schedule."""
        return self.auto_s / self.best_s

    @classmethod
    def of(cls, result: ModelResult) -> Start | None:
        """From a run of the training benchmark; None where nothing undisturbed was measured."""
        figures = result.figures()
        fixed_s = {
            name.removeprefix("wfbp-"): f.median_s for name, f in figures.items() if name in FIXED
        }
        if AUTO not in figures or not fixed_s:
            return None
        report = result.report(AUTO)
        late = "" if report.get("overlap", True) else ", late"
        best = min(fixed_s, key=lambda name: fixed_s[name])
        return cls(
            result.model,
            result.link,
            figures[AUTO].median_s,
            f"{report.get('schedule')}, {report.get('num_groups')} groups{late}",
            best,
            fixed_s[best],
            fixed_s,
        )


def main(words: Sequence[str]) -> int:
    """Start, measure, and print a table; exit status."""
    options = arguments(words)
    starts: list[Start] = []
    for number in range(options.starts):
        for model in options.models:
            result = run_model(model, options, "torch_worker")
            if result is None:
                return 1
            start = Start.of(result)
            if start is None:
                print(f"{model}: the machine was never quiet: left out", file=sys.stderr)
                continue
            starts.append(start)
            print(
                f"start {number + 1}, {model}: {start.auto_s * 1e3:.1f} ms by auto ({start.plan}), "
                f"{start.best_s * 1e3:.1f} by {start.best}: regret {start.regret:.3f}",
                file=sys.stderr,
                flush=True,
            )
            if options.json:
                Path(options.json).write_text(json.dumps(document(starts)))
    print_table(*table(starts))
    return 0


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks regret", description=__doc__)
    add_arguments(parser, MODELS, CONTESTANTS, FIXED, warm_up_steps=2000)
    parser.add_argument("--starts", type=int, default=1, help="fresh starts of auto per model")
    parser.set_defaults(models=list(MODELS))
    options = parser.parse_args(words)
    options.contestants = [*options.contestants, AUTO]
    return completed(options, CONTESTANTS, PER_TENSOR)


def table(starts: Sequence[Start]) -> tuple[str, list[str], list[list[str]]]:
    """Title, header and rows: one row per model, and one for all."""
    header = [
        "model",
        "starts",
        "median",
        "largest",
        f"within {LIMIT}",
        "auto ms",
        "best ms",
        "best",
    ]
    rows = []
    for model in dict.fromkeys(start.model for start in starts):
        its = [start for start in starts if start.model == model]
        rows.append([model, *_summary(its), *_times(its)])
    if starts:
        rows.append(["all", *_summary(starts), "", "", ""])
    link = starts[0].link if starts else LINKS[0]
    where = "shared memory" if link == "none" else f"{link}/s link"
    return f"regret of auto, {where}", header, rows


def document(starts: Sequence[Start]) -> dict[str, Any]:
    """All starts, with what is needed to repeat them."""
    return {
        "format": FORMAT,
        "command": ["python", "-m", "tests.benchmarks", *sys.argv[1:]],
        "environment": environment(),
        "starts": [{**asdict(start), "regret": start.regret} for start in starts],
    }


def _summary(starts: Sequence[Start]) -> list[str]:
    regrets = [start.regret for start in starts]
    share = sum(regret <= LIMIT for regret in regrets) / len(regrets)
    verdict = "" if share >= SHARE else " (missed)"
    return [
        str(len(regrets)),
        f"{statistics.median(regrets):.3f}",
        f"{max(regrets):.3f}",
        f"{share:.0%}{verdict}",
    ]


def _times(starts: Sequence[Start]) -> list[str]:
    bests = [start.best for start in starts]
    return [
        f"{statistics.median(start.auto_s for start in starts) * 1e3:.1f}",
        f"{statistics.median(start.best_s for start in starts) * 1e3:.1f}",
        ", ".join(dict.fromkeys(bests)),
    ]

"""``wfbp report``: a recorded run, or its timeline, as one page of interactive figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from wfbp.cli.figures.comparison import message_times, predicted_and_measured, schedules
from wfbp.cli.figures.cost_curve import cost_curve
from wfbp.cli.figures.gantt import gantt, step_of_timeline
from wfbp.cli.figures.scaling import coinciding, scaling
from wfbp.cli.forecast import Forecast, forecast
from wfbp.cli.inputs import check_sums
from wfbp.cli.page import Chapter, Section, write_page
from wfbp.cli.run_files import RankRun, Run, load_runs
from wfbp.cli.tables import milliseconds, size
from wfbp.cli.verdict import not_yet, verdict
from wfbp.core.cost import Costs
from wfbp.core.fit import MAX_KAPPA
from wfbp.core.plan import Plan
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.trace import Trace
from wfbp.runtime.timeline import load as load_timeline
from wfbp.runtime.timeline import merge, summarize
from wfbp.sim.scaling import FLAT
from wfbp.sim.sweep import SweepRow, sweep

PAGE = "report.html"
SCALED = ("wfbp", "single", "threshold", "mgwfbp", "oasr", "dear", "ipart", "hybrid")
"""Schedules that are shown for other numbers of workers."""
MOST_WORKERS = 2048


@click.command("report", short_help="Show a recorded run as one page that works offline.")
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--output", metavar="FILE", help=f"Where the page goes  [default: RUN_DIR/{PAGE}].")
def command(run_dir: str, output: str | None) -> None:
    """Show a recorded run as one HTML page that works offline.

    RUN_DIR is what WFBP_RECORD_DIR was set to while training: every rank left what it measured,
    planned and did there. The page shows an iteration of every rank, the network's cost curve,
    prediction against measurement, every schedule on what was measured, and other world sizes.
    What WFBP_TIMELINE was set to, the same directory or another one, is shown too: a step of every
    rank, and what steps took.
    """
    folder = Path(run_dir)
    timelines = sorted(folder.glob("timeline.rank*.json")) if folder.is_dir() else []
    recorded = not timelines or any(
        not path.name.startswith("timeline.") for path in folder.glob("*.json")
    )
    chapters = [chapter(run) for run in load_runs(run_dir)] if recorded else []
    if timelines:
        document = merge([load_timeline(path) for path in timelines])
        chapters += timeline_chapters(document)
        if not chapters:
            raise ValueError(f"{run_dir}: the timelines hold no step of training")
    target = str(folder / PAGE) if output is None else output
    write_page(target, f"wfbp run {folder.resolve().name}", chapters)
    click.echo(target)


def chapter(run: Run) -> Chapter:
    """All there is to show of one engine."""
    first = run.ranks[0]
    trace, costs = first.trace, first.costs
    if trace is None or costs is None:
        figure = gantt(run, None)
        return Chapter(
            run.name,
            verdict(run, []),
            _facts(run),
            _notes(run),
            [_gantt_section(figure)] if figure else [],
        )
    where = f"{run.name}, rank {first.rank}"
    check_sums(f"{where}: trace", f"{where}: costs", trace, costs, factor=2.0 * MOST_WORKERS)
    predicted = forecast(_in_order_of(trace, first.plan), trace, costs)
    every = [forecast(plan(name, trace, costs), trace, costs) for name in PLANNERS]
    sections = _sections(run, predicted, every, trace, costs)
    return Chapter(run.name, verdict(run, every), _facts(run), _notes(run), sections)


def timeline_chapters(document: dict[str, Any]) -> list[Chapter]:
    """What a merged timeline shows, a chapter for every optimizer."""
    rows = summarize(document)
    chapters = []
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        shown_step = step_of_timeline(document, optimizer)
        if shown_step is None:
            continue
        step, figure = shown_step
        facts = [
            (f"{name}, rank {row['rank']}", _ms(row[key], "one step only"))
            for row in rows
            if row["optimizer"] == optimizer and row["rank"] < _RANKS_IN_FACTS
            for name, key in _TIMELINE_FACTS
        ]
        section = Section(
            f"Step {step}, rank by rank",
            "The step of median length in the timeline, on one clock. Messages that lie under "
            "forward or backward are free; what training waits for is red.",
            figure,
        )
        chapters.append(Chapter(f"{optimizer}: timeline", "", facts, (), [section]))
    return chapters


_RANKS_IN_FACTS = 4
_TIMELINE_FACTS = (
    ("iteration", "iteration_s"),
    ("exposed", "exposed_s"),
    ("communication", "communication_s"),
)


def _gantt_section(figure: dict[str, object]) -> Section:
    return Section(
        "One iteration, rank by rank",
        "The iteration of median length among the last ones recorded. Messages that lie under "
        "backward or forward are free; what training waits for is red.",
        figure,
    )


def _sections(
    run: Run, predicted: Forecast, every: Sequence[Forecast], trace: Trace, costs: Costs
) -> list[Section]:
    sections = []
    if (figure := gantt(run, predicted)) is not None:
        sections.append(_gantt_section(figure))
    if (figure := predicted_and_measured(run)) is not None:
        sections.append(
            Section(
                "Predicted against measured",
                "The iteration and its exposed communication under the installed plan: from the "
                "measured trace and costs, and as every rank saw them afterwards.",
                figure,
            )
        )
    if (figure := message_times(run, predicted)) is not None:
        sections.append(
            Section(
                "Messages, predicted against measured",
                "How long each group kept the channel: by the cost curve, and the median over the "
                "recorded iterations on the slowest rank.",
                figure,
            )
        )
    sections.append(
        Section(
            "What a message costs",
            "Measured on this network by the backend that trained, packing included. Plans are "
            "made from the curve; the straight line shows how far alpha and beta would carry.",
            cost_curve(costs),
        )
    )
    ran = run.ranks[0]
    times = [r.figures["measured_iteration_s"] for r in run.ranks]
    known = [t for t in times if t is not None]
    sections.append(
        Section(
            "All schedules on what was measured",
            "Each schedule's prediction for this model on this network; the dashed line is what "
            "no schedule can beat.",
            schedules(every, (ran.plan.schedule, max(known)) if known else None),
        )
    )
    if run.size < 2:
        return sections
    sweeps = {
        name: sweep([trace], costs, _worlds(run.size), SCALED, name, measured_on=run.size)
        for name in FLAT
    }
    sections.append(
        Section(
            "What if there were more workers",
            f"The same model and batch per worker, on links that cost what those among these "
            f"{run.size} ranks do, by the cost models of three all-reduce algorithms."
            + "".join(_coincide(name, rows) for name, rows in sweeps.items()),
            scaling(sweeps),
        )
    )
    return sections


def _coincide(algorithm: str, rows: Sequence[SweepRow]) -> str:
    groups = [", ".join(group) for group in coinciding(rows)]
    if not groups:
        return ""
    return f" By {algorithm.replace('_', '-')}, within 0.5% of each other: {'; '.join(groups)}."


def _worlds(size: int) -> list[int]:
    """This number of ranks, and powers of two on both sides."""
    powers = {2**k for k in range(1, MOST_WORKERS.bit_length())}
    return sorted({size} | powers)


def _facts(run: Run) -> list[tuple[str, str]]:
    first = run.ranks[0]
    about, missing = first.about, f"not yet: {first.phase}"
    hosts = list(dict.fromkeys(rank.about.host for rank in run.ranks if rank.about.host))
    specs = first.plan.tensors
    counted = f"{sum(s.numel for s in specs):,} parameters in {len(specs)} tensors"
    facts = [
        ("optimizer", run.name),
        ("model", f"{about.model}: {counted}" if about.model else counted),
        ("gradients", size(first.plan.total_bytes)),
        ("ranks", str(run.size)),
        ("hosts", _listed(hosts)),
        ("written", about.written.replace("T", " ").replace("+00:00", " UTC")),
        ("versions", ", ".join(f"{name} {version}" for name, version in about.versions)),
        ("communication by", about.library),
        ("command", about.command),
        ("phase", first.phase),
        ("steps", f"{first.steps:,}"),
        ("schedule", first.plan.schedule + ("" if first.plan.overlap else ", after backward")),
        ("messages of tensors", f"{len(first.plan.groups)} of {len(specs)}"),
        ("iteration, measured", _ms(run.slowest("measured_iteration_s"), missing)),
        ("iteration, predicted", _ms(first.figures["predicted_iteration_s"], missing)),
        ("exposed, measured", _ms(run.slowest("exposed_s"), missing)),
        ("lower bound", _ms(first.figures["lower_bound_s"], missing)),
        ("T/LB, measured", _ratio(run.slowest("ratio_to_lower_bound"), missing)),
        ("interference (kappa)", _kappa(first, missing)),
    ]
    return [(name, value) for name, value in facts if value]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


_MOST_LISTED = 8


def _notes(run: Run) -> list[str]:
    first = run.ranks[0]
    notes = [text] if (text := not_yet(first.phase)) else []
    if not notes and (first.trace is None or first.costs is None):
        notes = ["Compute or network was not measured: there are no predictions to show."]
    if run.missing:
        listed = _listed([str(rank) for rank in run.missing])
        notes.append(f"{len(run.missing)} of {run.size} ranks left no file here: {listed}.")
    kappa = first.figures["kappa"]
    if kappa is not None and kappa >= MAX_KAPPA:
        notes.append(
            f"Interference (kappa) stands at its cap of {MAX_KAPPA:g}: overlapped plans took "
            "longer than any interference explains, as where ranks share cores."
        )
    return notes


def _kappa(rank: RankRun, missing: str) -> str:
    kappa = rank.figures["kappa"]
    if kappa is None:
        return missing
    return f"{kappa:.2f} (its cap)" if kappa >= MAX_KAPPA else f"{kappa:.2f}"


def _ratio(ratio: float | None, missing: str) -> str:
    return missing if ratio is None else f"{ratio:.3f}"


def _ms(seconds: float | None, missing: str) -> str:
    if seconds is None or not math.isfinite(seconds):
        return missing
    return f"{milliseconds(seconds)} ms"


def _in_order_of(trace: Trace, plan: Plan) -> Plan:
    """The same groups over the trace's order of tensors."""
    place = {spec.name: k for k, spec in enumerate(trace.specs)}
    groups = tuple(
        replace(g, tensors=tuple(place[plan.tensors[k].name] for k in g.tensors))
        for g in plan.groups
    )
    return replace(plan, tensors=trace.specs, groups=groups)

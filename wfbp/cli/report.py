"""``wfbp report``: a recorded run as one page of interactive figures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import click

from wfbp.cli.figures.comparison import message_times, predicted_and_measured, schedules
from wfbp.cli.figures.cost_curve import cost_curve
from wfbp.cli.figures.gantt import gantt
from wfbp.cli.figures.scaling import scaling
from wfbp.cli.forecast import Forecast, forecast
from wfbp.cli.inputs import check_sums
from wfbp.cli.page import Chapter, Section, write_page
from wfbp.cli.run_files import RankRun, Run, load_runs
from wfbp.cli.tables import milliseconds, size
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.trace import Trace
from wfbp.sim.scaling import FLAT
from wfbp.sim.sweep import sweep

PAGE = "report.html"
SCALED = ("wfbp", "single", "threshold", "mgwfbp", "oasr", "dear", "ipart", "hybrid")
"""Schedules that are shown for other numbers of workers."""
MOST_WORKERS = 2048


@click.command("report")
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--output", metavar="FILE", help=f"Where the page goes  [default: RUN_DIR/{PAGE}].")
def command(run_dir: str, output: str | None) -> None:
    """Show a recorded run as one HTML page that works offline.

    RUN_DIR is what WFBP_RECORD_DIR was set to while training: every rank left what it measured,
    planned and did there. The page shows an iteration of every rank, the network's cost curve,
    prediction against measurement, every schedule on what was measured, and other world sizes.
    """
    runs = load_runs(run_dir)
    chapters = [chapter(run) for run in runs]
    target = str(Path(run_dir) / PAGE) if output is None else output
    name = Path(run_dir).resolve().name
    write_page(target, f"wfbp run {name}", chapters)
    click.echo(target)


def chapter(run: Run) -> Chapter:
    """All there is to show of one engine."""
    first = run.ranks[0]
    trace, costs = first.trace, first.costs
    if trace is None or costs is None:
        figure = gantt(run, None)
        return Chapter(
            run.name,
            _facts(run),
            [
                *_notes(run),
                f"The run ended in its {first.phase} phase, before the network was measured: "
                "there are no predictions to show.",
            ],
            [_gantt_section(figure)] if figure else [],
        )
    where = f"{run.name}, rank {first.rank}"
    check_sums(f"{where}: trace", f"{where}: costs", trace, costs, factor=2.0 * MOST_WORKERS)
    predicted = forecast(_in_order_of(trace, first.plan), trace, costs)
    return Chapter(run.name, _facts(run), _notes(run), _sections(run, predicted, trace, costs))


def _gantt_section(figure: dict[str, object]) -> Section:
    return Section(
        "One iteration, rank by rank",
        "The iteration of median length among the last ones recorded. Messages that lie under "
        "backward or forward are free; what training waits for is red.",
        figure,
    )


def _sections(run: Run, predicted: Forecast, trace: Trace, costs: Costs) -> list[Section]:
    found = []
    if (figure := gantt(run, predicted)) is not None:
        found.append(_gantt_section(figure))
    if (figure := predicted_and_measured(run)) is not None:
        found.append(
            Section(
                "Predicted against measured",
                "The iteration and its exposed communication under the installed plan: from the "
                "measured trace and costs, and as every rank saw them afterwards.",
                figure,
            )
        )
    if (figure := message_times(run, predicted)) is not None:
        found.append(
            Section(
                "Messages, predicted against measured",
                "How long each group kept the channel: by the cost curve, and the median over the "
                "recorded iterations on the slowest rank.",
                figure,
            )
        )
    found.append(
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
    every = [forecast(plan(name, trace, costs), trace, costs) for name in PLANNERS]
    found.append(
        Section(
            "All schedules on what was measured",
            "Each schedule's prediction for this model on this network; the dashed line is what "
            "no schedule can beat.",
            schedules(every, (ran.plan.schedule, max(known)) if known else None),
        )
    )
    if run.size < 2:
        return found
    sweeps = {
        name: sweep([trace], costs, _worlds(run.size), SCALED, name, measured_on=run.size)
        for name in FLAT
    }
    found.append(
        Section(
            "What if there were more workers",
            f"The same model and batch per worker, on links that cost what those among these "
            f"{run.size} ranks do, by the cost models of three all-reduce algorithms.",
            scaling(sweeps),
        )
    )
    return found


def _worlds(size: int) -> list[int]:
    """This number of ranks, and powers of two on both sides."""
    powers = {2**k for k in range(1, MOST_WORKERS.bit_length())}
    return sorted({size} | powers)


def _facts(run: Run) -> list[tuple[str, str]]:
    first = run.ranks[0]
    measured = _slowest(run, "measured_iteration_s")
    exposed = _slowest(run, "exposed_s")
    ratio = _slowest(run, "ratio_to_lower_bound")
    return [
        ("schedule", first.plan.schedule + ("" if first.plan.overlap else ", after backward")),
        ("ranks", str(run.size)),
        ("messages of tensors", f"{len(first.plan.groups)} of {len(first.plan.tensors)}"),
        ("gradients", size(first.plan.total_bytes)),
        ("steps", f"{first.steps:,}"),
        ("iteration, measured", _ms(measured)),
        ("iteration, predicted", _ms(first.figures["predicted_iteration_s"])),
        ("exposed, measured", _ms(exposed)),
        ("lower bound", _ms(first.figures["lower_bound_s"])),
        ("T/LB, measured", "unknown" if ratio is None else f"{ratio:.3f}"),
        ("interference (kappa)", _plain(first)),
    ]


def _notes(run: Run) -> list[str]:
    if not run.missing:
        return []
    listed = ", ".join(map(str, run.missing[:8])) + ("..." if len(run.missing) > 8 else "")
    return [f"{len(run.missing)} of {run.size} ranks left no file here: {listed}."]


def _plain(rank: RankRun) -> str:
    kappa = rank.figures["kappa"]
    return "unknown" if kappa is None else f"{kappa:.2f}"


def _slowest(run: Run, key: str) -> float | None:
    return max((v for r in run.ranks if (v := r.figures[key]) is not None), default=None)


def _ms(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    return f"{milliseconds(seconds)} ms"


def _in_order_of(trace: Trace, plan: Plan) -> Plan:
    """The same groups over the trace's order of tensors."""
    place = {spec.name: k for k, spec in enumerate(trace.specs)}
    groups = tuple(
        replace(g, tensors=tuple(place[plan.tensors[k].name] for k in g.tensors))
        for g in plan.groups
    )
    return replace(plan, tensors=trace.specs, groups=groups)

"""``wfbp report``: a recorded run as one page of interactive figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wfbp.cli.run_files import BELOW_BOUND, Run, load_runs
from wfbp.cli.tables import short_milliseconds as _short
from wfbp.cli.tables import size
from wfbp.core.fit import MAX_KAPPA
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.ranks import counted
from wfbp.core.timeline import IterationForecast, timeline
from wfbp.runtime.tuning.candidates import reordered

if TYPE_CHECKING:
    from wfbp.cli.figures import Chapter

PAGE = "report.html"
NOTHING_TO_GAIN = 1.05
"""A smaller T/LB leaves too little to gain by another schedule."""
OFF = 1.5
"""A prediction that is wrong by this factor has another cause than noise."""
DIFFERENT = 0.1
"""A prediction that is wrong by more than this part is noted."""
LATE = 0.1
"""A rank is late if another waits for it for more than this part of the iteration."""


@click.command("report", short_help="Show a recorded run as one page that works offline.")
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--output", metavar="FILE", help=f"File for the page  [default: RUN_DIR/{PAGE}].")
def command(run_dir: str, output: str | None) -> None:
    """Show a recorded run as one HTML page that works offline.

    RUN_DIR is the value of WFBP_RECORD during training: every rank recorded its measurements,
    plans and iterations there. The page shows an iteration of every rank beside its prediction, the
    network's cost curve, and predictions of every schedule.
    """
    chapters = [chapter(run) for run in load_runs(run_dir)]
    from wfbp.cli.figures import write_page

    target = str(Path(run_dir) / PAGE) if output is None else output
    write_page(target, f"wfbp run {Path(run_dir).resolve().name}", chapters)
    click.echo(target)


def chapter(run: Run) -> Chapter:
    """All figures of one optimizer."""
    from wfbp.cli import figures

    first = run.ranks[0]
    trace, costs = first.trace, first.costs
    predicted: IterationForecast | None = None
    every: list[IterationForecast] = []
    if trace is not None and costs is not None:
        predicted = timeline(reordered(first.plan, trace), trace, costs)
        every = [timeline(plan(name, trace, costs), trace, costs) for name in PLANNERS]
    sections = []
    index, count = figures.median_iteration(run)
    if count:
        text = (
            f"Step {first.steps + 1 + index}, of median length among steps "
            f"{first.steps + 1 - count} to {first.steps}. Times count from when the previous "
            "iteration's gradients had arrived. Messages under backward or forward are free; red "
            "is time for which training waits."
        )
        figure = figures.gantt(run, index, predicted)
        sections.append(("One iteration, rank by rank", text, figure))
    if costs is not None and every:
        text = (
            "Measured on this network by the backend that trained, packing included. Plans are "
            "made from the curve; the straight line shows how far alpha and beta would carry."
        )
        sections.append(("What a message costs", text, figures.cost_curve(costs)))
        measured_s = run.slowest("measured_iteration_s")
        ran = None if measured_s is None else (first.plan.schedule, measured_s)
        text = (
            "Each schedule's prediction for this model on this network. T/LB is an iteration over "
            "the lower bound (LB) of all predictions; close to 1 there is little to gain."
        )
        figure = figures.schedules(every, ran)
        sections.append(("All schedules on what was measured", text, figure))
    return figures.Chapter(run.name, verdict(run, every), _facts(run), _notes(run), sections)


def verdict(run: Run, forecasts: Sequence[IterationForecast]) -> str:
    """One sentence: a late rank, a wrong prediction, nothing to gain, or a better schedule."""
    first = run.ranks[0]
    measured_s, exposed_s = run.slowest("measured_iteration_s"), run.slowest("exposed_s")
    if measured_s is None:
        return f"Too early to judge: {counted(first.steps, 'step')}, in the phase {first.phase}."
    if late := _late_rank(run):
        rank, for_rank, seconds = late
        return f"Rank {rank} waits {_short(seconds)} of every iteration for rank {for_rank}."
    if first.phase != "installed" or exposed_s is None:
        return f"Still choosing ({first.phase}): {_short(measured_s)} per iteration so far."
    predicted_s = first.figures["predicted_iteration_s"]
    if predicted_s and not 1 / OFF < measured_s / predicted_s < OFF:
        word = "slower" if measured_s > predicted_s else "faster"
        factor = max(measured_s / predicted_s, predicted_s / measured_s)
        return (
            f"Iterations are {factor:.1f} times {word} than predicted ({_short(measured_s)} "
            f"instead of {_short(predicted_s)}): does something else use the machine or the "
            "network?"
        )
    ratio = run.slowest("ratio_to_lower_bound")
    share = exposed_s / measured_s
    if ratio is not None and ratio <= NOTHING_TO_GAIN:
        bound = "Communication-bound" if share > LATE else "Compute-bound"
        return f"{bound}: T/LB {ratio:.2f}, nothing to gain by another schedule."
    sentence = f"Training waits {_short(exposed_s)} of {_short(measured_s)} ({share:.0%}) for "
    sentence += "communication" + ("" if ratio is None else f", T/LB {ratio:.2f}")
    best = min(forecasts, key=lambda f: f.iteration_s, default=None)
    if best is None or predicted_s is None or best.iteration_s > 0.98 * predicted_s:
        return f"{sentence}; no other schedule is predicted to be faster."
    gain = _short(predicted_s - best.iteration_s)
    return f"{sentence}; schedule {best.plan.schedule} is predicted to save {gain}."


def _late_rank(run: Run) -> tuple[int, int, float] | None:
    """The waiting rank, the late rank, and the seconds, if one ends backward much later."""
    count = min(len(rank.iterations) for rank in run.ranks)
    if not count or len(run.ranks) < 2:
        return None
    medians = [
        (
            statistics.median(iteration["closed_s"] for iteration in rank.iterations[-count:]),
            statistics.median(iteration["done_s"] for iteration in rank.iterations[-count:]),
            rank.rank,
        )
        for rank in run.ranks
    ]
    (first_s, _, early), (last_s, _, late) = min(medians), max(medians)
    length_s = max(done_s for _, done_s, _ in medians)
    return (early, late, last_s - first_s) if last_s - first_s > LATE * length_s else None


_RATIO = " (iteration / lower bound; close to 1 there is little to gain)"


def _facts(run: Run) -> list[tuple[str, str]]:
    first = run.ranks[0]
    about, missing = first.about, f"not yet: {first.phase}"
    hosts = list(dict.fromkeys(host for rank in run.ranks if (host := rank.about["host"])))
    specs = first.plan.tensors
    num_parameters = counted(sum(s.numel for s in specs), "parameter")
    parts = f"{num_parameters} in {counted(len(specs), 'tensor')}"
    ratio, kappa = run.slowest("ratio_to_lower_bound"), first.figures["kappa"]
    times = {
        "iteration, measured": run.slowest("measured_iteration_s"),
        "iteration, predicted": first.figures["predicted_iteration_s"],
        "exposed, measured": run.slowest("exposed_s"),
        "lower bound": first.figures["lower_bound_s"],
    }
    facts = [
        ("optimizer", run.name),
        ("model", f"{about['model']}: {parts}" if about["model"] else parts),
        ("gradients", size(first.plan.total_bytes)),
        ("ranks", str(run.size)),
        ("hosts", ", ".join(hosts)),
        ("written", about["written"].replace("T", " ").replace("+00:00", " UTC")),
        ("versions", about["versions"]),
        ("communication by", about["library"]),
        ("command", about["command"]),
        ("phase", first.phase),
        ("steps", f"{first.steps:,}"),
        ("schedule", first.plan.schedule + ("" if first.plan.overlap else ", after backward")),
        ("messages of tensors", f"{len(first.plan.groups)} of {len(specs)}"),
        *((name, missing if s is None else _short(s)) for name, s in times.items()),
        ("T/LB, measured", missing if ratio is None else f"{ratio:.2f}{_RATIO}"),
        ("interference (kappa)", missing if kappa is None else f"{kappa:.2f}"),
    ]
    return [(name, value) for name, value in facts if value]


def _notes(run: Run) -> list[str]:
    first = run.ranks[0]
    notes = []
    if first.phase != "installed":
        notes = [f"The run ended in its {first.phase}: what later steps measure is not known yet."]
    elif first.trace is None or first.costs is None:
        notes = ["Compute or network was not measured: there are no predictions to show."]
    notes += run.missing
    measured_s = run.slowest("measured_iteration_s")
    predicted_s = first.figures["predicted_iteration_s"]
    if measured_s and predicted_s and abs(measured_s / predicted_s - 1) > DIFFERENT:
        change = measured_s / predicted_s - 1
        notes.append(
            f"Measured iterations are {abs(change):.0%} {'longer' if change > 0 else 'shorter'} "
            f"than predicted ({_short(measured_s)} instead of {_short(predicted_s)}). The "
            "predictions below are for compute and network as measured at the start of the run."
        )
    ratio = run.slowest("ratio_to_lower_bound")
    if ratio is not None and ratio < 1.0:
        notes.append(f"T/LB {ratio:.2f}: {BELOW_BOUND}.")
    kappa = first.figures["kappa"]
    if kappa is not None and kappa >= MAX_KAPPA:
        notes.append(
            f"Interference (kappa) is at its cap of {MAX_KAPPA:g}: messages take the whole core "
            "that computes, so overlap gains little; or ranks share cores."
        )
    return notes

"""``wfbp plan``: predicts a schedule for a model on a network, or recommends one."""

from __future__ import annotations

import json
from typing import Any

import click

from wfbp.cli.forecast import Forecast, forecast
from wfbp.cli.inputs import IntegerRange, Model, best, json_option, load, model_arguments
from wfbp.cli.tables import Column, milliseconds, print_table, size
from wfbp.core.planners import PLANNERS, RECOMMENDED, plan

ALL = "all"


@click.command("plan", short_help="Predict one iteration, by one schedule or by all.")
@model_arguments
@click.option(
    "--schedule",
    metavar="NAME",
    default=ALL,
    show_default=True,
    help=f"Recommended: {', '.join(n for n in RECOMMENDED if n in PLANNERS)}. For comparison: "
    f"{', '.join(n for n in PLANNERS if n not in RECOMMENDED)}; or all.",
)
@click.option(
    "--threshold-bytes",
    type=IntegerRange(min=1),
    help="Group size of the schedule 'threshold' [default: 25 MiB].",
)
@click.option(
    "--rows",
    type=IntegerRange(min=0),
    default=40,
    show_default=True,
    help="Groups to list at most; 0 for all.",
)
@json_option
def command(
    trace: str,
    cost: str | None,
    optimizer: str | None,
    schedule: str,
    threshold_bytes: int | None,
    rows: int,
    as_json: bool,
) -> None:
    """Plan the messages of one training step and predict the iteration.

    TRACE has the model's tensors and compute times: a file (wfbp-trace/1), an example (wfbp traces
    lists them), or the directory of a recorded run (WFBP_RECORD), which also has costs. Times
    of groups count from the start of backward; T/LB is the iteration over the lower bound of all
    schedules.
    """
    if schedule != ALL and schedule not in PLANNERS:
        raise click.BadParameter(
            f"{schedule!r} is not known; known are {', '.join(PLANNERS)}, {ALL}",
            param_hint="--schedule",
        )
    if threshold_bytes is not None and schedule not in (ALL, "threshold"):
        raise click.BadParameter(
            f"schedule {schedule!r} takes none", param_hint="--threshold-bytes"
        )
    source = load(trace, cost, optimizer=optimizer)
    results = []
    for name in PLANNERS if schedule == ALL else (schedule,):
        options: dict[str, Any] = {}
        if name == "threshold" and threshold_bytes is not None:
            options["threshold_bytes"] = threshold_bytes
        made = plan(name, source.trace, source.costs, **options)
        results.append(forecast(made, source.trace, source.costs))
    first = best([r.iteration_s for r in results], [len(r.groups) for r in results])
    if as_json:
        told: dict[str, Any] = results[0].to_json()
        if schedule == ALL:
            schedules = [result.to_json() for result in results]
            told = {"schedule": ALL, "best": results[first].schedule, "schedules": schedules}
        click.echo(json.dumps(told, indent=1, allow_nan=False))
    elif schedule == ALL:
        _print_all(results, first, source)
    else:
        _print_one(results[0], source, rows)


def _print_one(result: Forecast, source: Model, rows: int) -> None:
    trace = source.trace
    shown = result.groups if not rows else result.groups[:rows]
    left = len(result.groups) - len(shown)
    notes = [f"... and {left} more groups (--rows 0 lists all)", ""] if left else []
    notes += [
        f"iteration {milliseconds(result.iteration_s)} ms, of which "
        f"{milliseconds(result.exposed_s)} ms exposed communication",
        f"T/LB {result.ratio_to_lower_bound:.3f}: no schedule can be under "
        f"{milliseconds(result.lower_bound_s)} ms",
        *_measured(source),
    ]
    cells = []
    for index, group in enumerate(shown):
        first, last, count = group.tensors[0], group.tensors[-1], len(group.tensors)
        times = map(milliseconds, (group.start_s, group.end_s, group.exposed_s))
        members = first if count == 1 else f"{count}: {first} ... {last}"
        operation = group.operation.value
        cells.append((str(index), operation, members, size(group.nbytes), *times, group.why))
    print_table(
        f"{trace.model or 'model'}: schedule {result.schedule}, {len(result.groups)} groups of "
        f"{len(trace.tensors)} tensors, {size(sum(trace.backward_bytes))}; times in ms",
        (
            Column("#"),
            Column("operation", "left"),
            Column("tensors", "left"),
            *map(Column, ("size", "start", "end", "exposed")),
            Column("why", "left"),
        ),
        cells,
        notes,
    )


def _print_all(results: list[Forecast], first: int, source: Model) -> None:
    trace, least_s = source.trace, results[first].iteration_s
    headings = ("messages", "iteration", "exposed", "T/LB", "over best")
    print_table(
        f"{trace.model or 'model'}: {len(trace.tensors)} tensors, "
        f"{size(sum(trace.backward_bytes))}; times in ms",
        (Column("schedule", "left"), *map(Column, headings)),
        [
            (
                r.schedule,
                str(len(r.groups)),
                milliseconds(r.iteration_s),
                milliseconds(r.exposed_s),
                f"{r.ratio_to_lower_bound:.3f}",
                "best" if index == first else f"+{max(0.0, r.iteration_s / least_s - 1):.1%}",
            )
            for index, r in enumerate(results)
        ],
        [
            f"no schedule can be under {milliseconds(results[first].lower_bound_s)} ms (LB)",
            *_measured(source),
        ],
        first,
    )


def _measured(source: Model) -> list[str]:
    """The measurements of the recorded run."""
    if source.run is None:
        return []
    ran = source.run.ranks[0].plan
    known = [
        f"{milliseconds(seconds)} ms {word}"
        for key, word in (("measured_iteration_s", "measured"), ("exposed_s", "exposed"))
        if (seconds := source.run.slowest(key)) is not None
    ]
    notes = [
        f"the run itself, by {ran.schedule} in {len(ran.groups)} messages: "
        f"{', '.join(known) or 'not yet measured'}"
    ]
    if absent := source.run.missing:
        listed = ", ".join(map(str, absent))
        notes.append(f"no file of {len(absent)} of {source.run.size} ranks: {listed}")
    return notes

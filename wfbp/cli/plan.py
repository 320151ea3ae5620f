"""``wfbp plan``: what a schedule does with a model on a network, or which schedule to take."""

from __future__ import annotations

import json
from typing import Any

import click

from wfbp.cli.forecast import Forecast, GroupForecast, forecast
from wfbp.cli.inputs import best, cost_option, json_option, load, trace_argument
from wfbp.cli.tables import Column, milliseconds, print_table, size
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.trace import Trace

ALL = "all"


@click.command("plan")
@trace_argument
@cost_option
@click.option(
    "--schedule",
    metavar="NAME",
    default=ALL,
    show_default=True,
    help=f"One of {', '.join(PLANNERS)}; or all, to compare.",
)
@click.option(
    "--threshold-bytes",
    type=click.IntRange(min=1),
    help="Group size of the schedule 'threshold' [default: 25 MiB].",
)
@click.option(
    "--rows",
    type=click.IntRange(min=0),
    default=40,
    show_default=True,
    help="Groups to list at most; 0 for all.",
)
@json_option
def command(
    trace: str, cost: str, schedule: str, threshold_bytes: int | None, rows: int, as_json: bool
) -> None:
    """Plan the messages of one training step and predict the iteration.

    TRACE.json (format wfbp-trace/1) tells the model's tensors and compute times. Times of groups
    count from the start of backward; T/LB is the iteration over what no schedule can beat.
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
    model, costs = load(trace, cost)

    def answer(name: str) -> Forecast:
        options: dict[str, Any] = {}
        if name == "threshold" and threshold_bytes is not None:
            options["threshold_bytes"] = threshold_bytes
        return forecast(plan(name, model, costs, **options), model, costs)

    results = [answer(name) for name in (PLANNERS if schedule == ALL else (schedule,))]
    if schedule == ALL:
        _print_all(results, model, as_json)
    else:
        _print_one(results[0], model, rows, as_json)


def _print_one(result: Forecast, trace: Trace, rows: int, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.to_json(), indent=1, allow_nan=False))
        return
    shown = result.groups if not rows else result.groups[:rows]
    left = len(result.groups) - len(shown)
    notes = [f"... and {left} more groups (--rows 0 lists all)", ""] if left else []
    notes += [
        f"iteration {milliseconds(result.iteration_s)} ms, of which "
        f"{milliseconds(result.exposed_s)} ms exposed communication; T/LB "
        f"{result.ratio_to_lower_bound:.3f} (no schedule can be under "
        f"{milliseconds(result.lower_bound_s)} ms)",
    ]
    print_table(
        f"{trace.model or 'model'}: schedule {result.schedule}, {len(result.groups)} groups of "
        f"{len(trace.tensors)} tensors, {size(sum(trace.backward_bytes))}; times in ms",
        (
            Column("#"),
            Column("operation", "left"),
            Column("tensors", "left", cut=True),
            Column("size"),
            Column("start"),
            Column("end"),
            Column("exposed"),
            Column("why", "left", cut=True),
        ),
        [(str(i), *_row(group)) for i, group in enumerate(shown)],
        notes,
    )


def _row(group: GroupForecast) -> tuple[str, ...]:
    first, last, count = group.tensors[0], group.tensors[-1], len(group.tensors)
    members = first if count == 1 else f"{count}: {first} ... {last}"
    return (
        group.operation.value,
        members,
        size(group.nbytes),
        milliseconds(group.start_s),
        milliseconds(group.end_s),
        milliseconds(group.exposed_s),
        group.why,
    )


def _print_all(results: list[Forecast], trace: Trace, as_json: bool) -> None:
    first = best([r.iteration_s for r in results], [len(r.groups) for r in results])
    if as_json:
        data = {
            "schedule": ALL,
            "best": results[first].schedule,
            "schedules": [result.to_json() for result in results],
        }
        click.echo(json.dumps(data, indent=1, allow_nan=False))
        return
    least_s = results[first].iteration_s
    print_table(
        f"{trace.model or 'model'}: {len(trace.tensors)} tensors, "
        f"{size(sum(trace.backward_bytes))}; times in ms",
        (
            Column("schedule", "left"),
            Column("messages"),
            Column("iteration"),
            Column("exposed"),
            Column("T/LB"),
            Column("over best"),
        ),
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
        [f"no schedule can be under {milliseconds(results[first].lower_bound_s)} ms (LB)"],
        first,
    )

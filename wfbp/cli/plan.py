"""``wfbp plan``: predicts a schedule for a model on a network, or recommends one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from wfbp.cli.inputs import (
    NAMES,
    best,
    compressed,
    json_option,
    load,
    model_arguments,
    schedule_option,
)
from wfbp.cli.run_files import BELOW_BOUND, Run
from wfbp.cli.tables import milliseconds, print_table, size
from wfbp.core.cost import Costs, PiecewiseCost
from wfbp.core.planners import PLANNERS, RECOMMENDED, plan
from wfbp.core.ranks import counted
from wfbp.core.timeline import IterationForecast, timeline
from wfbp.core.trace import Trace
from wfbp.core.types import Operation, Phase

_SAME = 1e-9  # relative; rounding may differ by as much


@click.command("plan", short_help="Predict one iteration, by one schedule or by all.", epilog=NAMES)
@model_arguments
@schedule_option(
    default="all",
    help=f"Recommended: {', '.join(n for n in RECOMMENDED if n in PLANNERS)}. For comparison: "
    f"{', '.join(n for n in PLANNERS if n not in RECOMMENDED)}; or all.",
)
@json_option
def command(
    trace: str,
    cost: str | None,
    compression: str,
    optimizer: str | None,
    names: tuple[str, ...],
    as_json: bool,
) -> None:
    """Plan the messages of one training step and predict the iteration.

    TRACE holds a model's tensors and compute times: a file (wfbp-trace/1), an example (below),
    or the directory of a recorded run (WFBP_RECORD), which also has costs. Times
    of groups count from the start of backward; T/LB is the iteration over the lower bound of all
    schedules.
    """
    model, costs, num_ranks, run = load(trace, cost, optimizer)
    costs = compressed(costs, model, compression, num_ranks or 2, of_run=cost is None)
    results = [timeline(plan(name, model, costs), model, costs) for name in names]
    first = best([r.iteration_s for r in results], [len(r.groups) for r in results])
    if as_json:
        told = [_document(result) for result in results]
        comparison = {
            "format": "wfbp-forecasts/1",
            "schedule": "all" if len(names) == len(PLANNERS) else ",".join(names),
            "best": names[first],
            "schedules": told,
        }
        click.echo(json.dumps(told[0] if len(told) == 1 else comparison, indent=1, allow_nan=False))
        return
    notes = [*_about_bound(results[0].lower_bound_s, run), *_extrapolated(results, costs)]
    if len(results) == 1:
        _print_one(results[0], model, notes)
    else:
        _print_all(results, model, first, notes)


def _document(result: IterationForecast) -> dict[str, Any]:
    figures = ("iteration_s", "exposed_s", "lower_bound_s", "ratio_to_lower_bound")
    plan = result.plan
    return {
        "format": "wfbp-forecast/1",
        "schedule": plan.schedule,
        "predicted": {name: getattr(result, name) for name in figures},
        "groups": [
            {
                "phase": group.phase.value,
                "operation": group.operation.value,
                "tensors": [plan.tensors[k].name for k in group.tensors],
                "nbytes": at.nbytes,
                "start_s": at.start_s,
                "end_s": at.end_s,
            }
            for group, at in zip(plan.groups, result.groups, strict=True)
        ],
    }


def _print_one(result: IterationForecast, trace: Trace, notes: Sequence[str]) -> None:
    groups, tensors = result.plan.groups, result.plan.tensors
    cells = []
    for index, why in enumerate(reasons(result)):
        group, at = groups[index], result.groups[index]
        first, last = (tensors[group.tensors[k]].name for k in (0, -1))
        members = f"{len(group.tensors)}: {first} ... {last}" if len(group.tensors) > 1 else first
        times = map(milliseconds, (at.start_s, at.end_s, at.exposed_s))
        cells.append((str(index), group.operation.value, members, size(at.nbytes), *times, why))
    print_table(
        f"{trace.model or 'model'}: schedule {result.plan.schedule}, "
        f"{counted(len(groups), 'group')} of {counted(len(tensors), 'tensor')}, "
        f"{size(result.plan.total_bytes)}; times in ms",
        ("#", "<operation", "<tensors", "size", "start", "end", "exposed", "<why"),
        cells,
        [
            f"iteration {milliseconds(result.iteration_s)} ms, of which "
            f"{milliseconds(result.exposed_s)} ms exposed communication; "
            f"T/LB {result.ratio_to_lower_bound:.3f}",
            *notes,
        ],
    )


def _print_all(
    results: Sequence[IterationForecast], trace: Trace, first: int, notes: Sequence[str]
) -> None:
    least_s = results[first].iteration_s
    print_table(
        f"{trace.model or 'model'}: {counted(len(trace.tensors), 'tensor')}, "
        f"{size(sum(trace.backward_bytes))}; times in ms",
        ("<schedule", "messages", "iteration", "exposed", "T/LB", "over best"),
        [
            (
                result.plan.schedule,
                str(len(result.groups)),
                milliseconds(result.iteration_s),
                milliseconds(result.exposed_s),
                f"{result.ratio_to_lower_bound:.3f}",
                "best" if index == first else f"+{max(0.0, result.iteration_s / least_s - 1):.1%}",
            )
            for index, result in enumerate(results)
        ],
        notes,
        first,
    )


def reasons(predicted: IterationForecast) -> list[str]:
    """The reason for the start of each group, and what waits for it, a line for people."""
    plan = predicted.plan
    same_s = _SAME * predicted.iteration_s
    told = []
    for group, at in zip(plan.groups, predicted.groups, strict=True):
        waited_s = at.start_s - at.ready_s
        if waited_s > same_s:
            why = f"waits {waited_s * 1e3:,.3f} ms for the channel"
        elif group.phase is Phase.BACKWARD:
            why = f"leaves when {plan.tensors[min(group.tensors)].name} is ready"
        else:
            why = "leaves when forward starts"
        exposed = at.exposed_s > same_s
        told.append(f"{why}; {f'{at.exposed_s * 1e3:,.3f} ms exposed' if exposed else 'hidden'}")
    return told


def _about_bound(bound_s: float, run: Run | None) -> list[str]:
    """Lines about the lower bound and the times of a recorded run."""
    bound = f"no schedule can be under {milliseconds(bound_s)} ms (LB)"
    if run is None:
        return [bound]
    measured_s = run.slowest("measured_iteration_s")
    if measured_s is not None and measured_s < bound_s:
        bound = f"LB {milliseconds(bound_s)} ms: {BELOW_BOUND}"
    ran = run.ranks[0].plan
    known = [
        f"{milliseconds(seconds)} ms {word}"
        for key, word in (("measured_iteration_s", "measured"), ("exposed_s", "exposed"))
        if (seconds := run.slowest(key)) is not None
    ]
    notes = [
        bound,
        f"the run itself, by {ran.schedule} in {counted(len(ran.groups), 'message')}: "
        f"{', '.join(known) or 'not yet measured'}",
    ]
    return notes + run.missing


def _extrapolated(results: Sequence[IterationForecast], costs: Costs) -> list[str]:
    """Lines about messages that are larger than the measured ones."""
    largest: dict[Operation, int] = {}
    for result in results:
        for group, at in zip(result.plan.groups, result.groups, strict=True):
            largest[group.operation] = max(largest.get(group.operation, 0), at.nbytes)
    return [
        f"{operation.value} was measured up to {size(measured)}; times of larger messages, up to "
        f"{size(nbytes)}, are extrapolated"
        for operation, nbytes in largest.items()
        if isinstance(curve := costs.of(operation), PiecewiseCost)
        and nbytes > (measured := curve.points[-1][0])
    ]

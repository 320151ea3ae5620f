"""``wfbp simulate``: predicts the same model on other numbers of workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from wfbp.cli.inputs import (
    FiniteRange,
    IntegerRange,
    best,
    json_option,
    load,
    model_arguments,
)
from wfbp.cli.tables import Column, milliseconds, print_table
from wfbp.core.bound import ratio_to_lower_bound
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.fit import fit_linear
from wfbp.core.planners import PLANNERS
from wfbp.core.trace import Trace
from wfbp.sim.scaling import ALGORITHMS, Link, Node, scale
from wfbp.sim.sweep import SweepRow, sweep

DEFAULT_WORKERS = ",".join(str(2**k) for k in range(2, 12))
MOST_WORKERS = 2**24
HIERARCHICAL = "hierarchical"


def _names(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    """Names of schedules, separated by commas."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ("all",):
        return tuple(PLANNERS)
    for name in names:
        if name not in PLANNERS:
            raise click.BadParameter(f"{name!r} is not known; known are {', '.join(PLANNERS)}, all")
    return names


def _counts(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    """Numbers of workers, separated by commas; ``...`` repeats the factor of the two before it."""
    counts: list[int] = []
    parts = [part.strip() for part in text.split(",")]
    for index, part in enumerate(parts):
        if part == "..." and len(counts) >= 2 and index == len(parts) - 2:
            before, last = counts[-2:]
            factor, rest = divmod(last, before)
            if rest or factor < 2:
                raise click.BadParameter(
                    f"'...' repeats a whole factor, which {before},{last} does not have"
                )
            end = _count(parts[-1])
            while (last := last * factor) < end:
                counts.append(last)
        else:
            counts.append(_count(part))
    return tuple(sorted(set(counts)))


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST_WORKERS:
        raise click.BadParameter(f"{text!r} is not a number of workers from 1 to {MOST_WORKERS}")
    return int(text)


@click.command("simulate", short_help="Predict the iteration time for other numbers of workers.")
@model_arguments
@click.option(
    "--workers",
    callback=_counts,
    metavar="P,P,...",
    default=DEFAULT_WORKERS,
    help="Numbers of workers; 4,8,...,2048 continues the sequence.  [default: 4,8,...,2048]",
)
@click.option(
    "--algorithm",
    type=click.Choice(ALGORITHMS),
    default="ring",
    show_default=True,
    help="How all-reduce works among them.",
)
@click.option(
    "--schedule",
    "schedules",
    callback=_names,
    metavar="NAME,...",
    default="all",
    show_default=True,
    help="Schedules to compare.",
)
@click.option(
    "--measured-on",
    type=IntegerRange(min=2, max=MOST_WORKERS),
    help="Number of workers among which COST was measured  [default: those of the run or the "
    "example; else 2].",
)
@click.option("--per-link", is_flag=True, help="COST is the cost of one hop over one link.")
@click.option(
    "--node-workers",
    type=IntegerRange(min=1, max=MOST_WORKERS),
    default=8,
    show_default=True,
    help="hierarchical: workers of a host.",
)
@click.option(
    "--node-speed",
    type=FiniteRange(min=0.0, min_open=True, max=1e9),
    default=10.0,
    show_default=True,
    help="hierarchical: how many times faster links within a host are than those between hosts.",
)
@json_option
def command(
    trace: str,
    cost: str | None,
    optimizer: str | None,
    workers: tuple[int, ...],
    algorithm: str,
    schedules: tuple[str, ...],
    measured_on: int | None,
    per_link: bool,
    node_workers: int,
    node_speed: float,
    as_json: bool,
) -> None:
    """Predict the iteration on other numbers of workers, with the same batch per worker.

    TRACE and COST are files, examples (wfbp traces), or one directory of a recorded run for both.
    The algorithm's cost model turns COST into the cost of one link, and that into costs for every
    number of workers. It replaces measured curves by their fitted lines.
    """
    factor = 2.0 * max(workers) * max(1.0, 1.0 / node_speed)
    loaded = load(trace, cost, factor, optimizer)
    model, costs = loaded.trace, loaded.costs
    if cost is None and (measured_on is not None or per_link):
        raise click.UsageError(
            f"the run's costs were measured among {loaded.measured_on} ranks; leave "
            "--measured-on and --per-link out, or give --cost"
        )
    known = measured_on or loaded.measured_on
    measured_on = known or 2
    source = _link(costs) if per_link else costs
    node = None
    if algorithm == HIERARCHICAL:
        one = source if isinstance(source, Link) else _one_link(costs, measured_on)
        inner = Link(one.alpha_s / node_speed, one.beta_s_per_byte / node_speed)
        node = Node(node_workers, inner)
    rows = sweep([model], source, workers, schedules, algorithm, measured_on=measured_on, node=node)
    if as_json:
        results = [
            asdict(row)
            | {
                "exposed_s": max(0.0, row.iteration_s - row.compute_s),
                "ratio_to_lower_bound": ratio_to_lower_bound(row.iteration_s, row.lower_bound_s),
                "efficiency": row.efficiency,
                "speedup": row.speedup,
            }
            for row in rows
        ]
        document = {"model": model.model, "algorithm": algorithm, "results": results}
        click.echo(json.dumps(document, indent=1, allow_nan=False))
        return
    if per_link:
        origin = "costs are those of one link"
    elif known is None:
        origin = "costs are taken as measured between 2 workers; if among P: --measured-on P"
    else:
        origin = f"costs were measured among {known} workers"
    _print(model, algorithm, schedules, rows, origin)


def _link(costs: Costs) -> Link:
    line = costs.all_reduce
    if isinstance(line, PiecewiseCost):
        line = fit_linear(line.points)
    assert isinstance(line, LinearCost)
    return Link(line.alpha_s, line.beta_s_per_byte)


def _one_link(costs: Costs, measured_on: int) -> Link:
    """One hop, from an all-reduce: between two workers a ring has two hops, of half the bytes."""
    pair = _link(scale(costs, 2, measured_on=measured_on))
    return Link(pair.alpha_s / 2, pair.beta_s_per_byte)


def _print(
    trace: Trace, algorithm: str, schedules: Sequence[str], rows: Sequence[SweepRow], origin: str
) -> None:
    table: dict[int, dict[str, SweepRow]] = {}
    for row in rows:
        table.setdefault(row.workers, {})[row.schedule] = row
    cells = []
    for count, by_schedule in table.items():
        every = list(by_schedule.values())
        chosen = every[best([r.iteration_s for r in every], [r.num_groups for r in every])]
        cells.append(
            (
                str(count),
                *(f"{by_schedule[name].iteration_s * 1e3:,.1f}" for name in schedules),
                f"{chosen.lower_bound_s * 1e3:,.1f}",
                chosen.schedule,
                f"{chosen.efficiency:.1%}",
                f"{chosen.speedup:,.1f}",
            )
        )
    print_table(
        f"{trace.model or 'model'} by {algorithm}: iteration in ms "
        f"({milliseconds(rows[0].compute_s)} ms without communication)",
        (
            Column("workers"),
            *(Column(name) for name in schedules),
            Column("LB"),
            Column("best", "left"),
            Column("efficiency"),
            Column("speed-up"),
        ),
        cells,
        ["efficiency and speed-up are those of the best schedule, over one worker", origin],
    )

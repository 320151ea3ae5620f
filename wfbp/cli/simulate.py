"""``wfbp simulate``: predicts the same model on other numbers of workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

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
from wfbp.cli.tables import milliseconds, print_table
from wfbp.core.bound import ratio_to_lower_bound
from wfbp.core.cost import Costs
from wfbp.core.planners import PLANNERS, RECOMMENDED
from wfbp.core.ranks import counted
from wfbp.launcher.hosts import MOST_RANKS
from wfbp.sim.scaling import ALGORITHMS, Link, Node, control_s, link_of, scale
from wfbp.sim.sweep import SweepRow, sweep

DEFAULT_WORKERS = ",".join(str(2**k) for k in range(2, 12))
HIERARCHICAL = "hierarchical"
SHOWN = tuple(name for name in RECOMMENDED if name in PLANNERS)
FAST = 10.0
"""How many times faster links within a host are than those between hosts, if nothing tells."""


def _counts(ctx: click.Context, param: click.Parameter, text: str) -> list[int]:
    """Numbers of workers, separated by commas, in increasing order."""
    kind = click.IntRange(1, MOST_RANKS)
    return sorted({kind(part, param, ctx) for part in text.split(",")})


@click.command(
    "simulate", short_help="Predict the iteration time for other numbers of workers.", epilog=NAMES
)
@model_arguments
@click.option(
    "--workers",
    callback=_counts,
    metavar="P,P,...",
    default=DEFAULT_WORKERS,
    help="Numbers of workers.",
)
@click.option(
    "--algorithm",
    type=click.Choice(ALGORITHMS),
    default="ring",
    help="How all-reduce works among them.",
)
@schedule_option(
    default=",".join(SHOWN),
    help="Schedules to compare, or all. auto takes the best one that its trial finds.",
)
@click.option(
    "--measured-on",
    type=click.IntRange(2, MOST_RANKS),
    help="Number of workers that COST was measured on  [default: those of the run or the "
    "example; else 2].",
)
@click.option("--per-link", is_flag=True, help="COST is the cost of one hop over one link.")
@click.option(
    "--ranks-per-host",
    type=click.IntRange(1, MOST_RANKS),
    default=8,
    help="hierarchical: ranks of a host; COST is that of one rank per host.",
)
@click.option(
    "--within",
    metavar="COST",
    help="hierarchical: the cost of ranks on one host  [default: links 10 times as fast as those "
    "between hosts].",
)
@json_option
def command(
    trace: str,
    cost: str | None,
    compression: str,
    optimizer: str | None,
    workers: list[int],
    algorithm: str,
    names: tuple[str, ...],
    measured_on: int | None,
    per_link: bool,
    ranks_per_host: int,
    within: str | None,
    as_json: bool,
) -> None:
    """Predict the iteration on other numbers of workers, with the same batch per worker.

    TRACE and COST are files, examples (below), or one directory of a recorded run for both.
    The algorithm's cost model turns COST into the cost of one link, and that into costs for every
    number of workers. Measured curves become lines for numbers that were not measured.
    """
    model, costs, by_ranks, _ = load(trace, cost, optimizer)
    if cost is None and (measured_on is not None or per_link):
        raise click.UsageError(
            f"the run's costs were measured among {by_ranks} ranks; leave --measured-on and "
            "--per-link out, or give --cost"
        )
    known = measured_on or by_ranks
    measured_on = known or 2
    source = link_of(costs) if per_link else costs
    link = source if isinstance(source, Link) else _link(costs, measured_on)
    node = None
    if algorithm == HIERARCHICAL:
        if within is not None:
            _, inner, inner_ranks, _ = load(trace, within, optimizer)
            node = Node(ranks_per_host, inner, inner_ranks or 2)
        else:
            fast = Link(link.alpha_s / FAST, link.beta_s_per_byte / FAST)
            node = Node(ranks_per_host, fast)
        if compression != "none":
            raise click.UsageError(
                f"--compression is not for --algorithm {HIERARCHICAL}: within hosts all is exact"
            )
    elif within is not None:
        raise click.UsageError("--within needs --algorithm hierarchical")
    rows = []
    for count in workers:
        at = scale(source, count, algorithm, measured_on=measured_on, node=node)
        # A tensor's shards get smaller, and then too small to be encoded.
        at = compressed(at, model, compression, max(count, 2), of_run=cost is None)
        found = sweep([model], at, [count], names, measured_on=max(count, 2))
        rows += [replace(row, algorithm=algorithm) for row in found]
    if as_json:
        results = [
            asdict(row)
            | {
                "exposed_s": max(0.0, row.iteration_s - row.compute_s),
                "ratio_to_lower_bound": ratio_to_lower_bound(row.iteration_s, row.lower_bound_s),
                "efficiency": row.efficiency,
                "speedup": row.speedup,
                "control_s": control_s(link, row.workers),
            }
            for row in rows
        ]
        document = {
            "format": "wfbp-simulation/1",
            "model": model.model,
            "algorithm": algorithm,
            "results": results,
        }
        click.echo(json.dumps(document, indent=1, allow_nan=False))
        return
    if per_link:
        origin = "costs are those of one link"
    elif known is None:
        origin = "costs are taken as measured between 2 workers; if among P: --measured-on P"
    else:
        origin = f"costs were measured among {known} workers"
    compute_ms = milliseconds(rows[0].compute_s)
    most = max(workers)
    print_table(
        f"{model.model or 'model'} by {algorithm}: iteration in ms "
        f"({compute_ms} ms without communication)",
        ("workers", *names, "LB", "<best", "efficiency", "speed-up"),
        [_cells(rows[start : start + len(names)]) for start in range(0, len(rows), len(names))],
        [
            "efficiency and speed-up are those of the best schedule, over one worker",
            f"control messages before the first plan take at most {control_s(link, most):.2g} s "
            f"with {counted(most, 'worker')}",
            origin,
        ],
    )


def _link(costs: Costs, measured_on: int) -> Link:
    """The link of costs by a ring. Between two workers it has two hops, of half the bytes each."""
    pair = link_of(scale(costs, 2, measured_on=measured_on))
    return Link(pair.alpha_s / 2, pair.beta_s_per_byte)


def _milliseconds(seconds: float) -> str:
    """With a decimal, if there are at most three digits before it."""
    return f"{seconds * 1e3:,.{1 if seconds < 1 else 0}f}"


def _cells(rows: Sequence[SweepRow]) -> list[str]:
    """A line of the table: all schedules on one number of workers."""
    chosen = rows[best([row.iteration_s for row in rows], [row.num_groups for row in rows])]
    return [
        str(chosen.workers),
        *(_milliseconds(row.iteration_s) for row in rows),
        _milliseconds(chosen.lower_bound_s),
        chosen.schedule,
        f"{chosen.efficiency:.1%}",
        f"{chosen.speedup:,.1f}",
    ]

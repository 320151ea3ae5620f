"""``wfbp simulate``: the same model on other numbers of workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

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


class _Names(click.ParamType[tuple[str, ...]]):
    """Names of schedules, separated by commas."""

    name = "names"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
        if names == ("all",):
            return tuple(PLANNERS)
        for name in names:
            if name not in PLANNERS:
                self.fail(f"{name!r} is not known; known are {', '.join(PLANNERS)}, all")
        return names


class _Counts(click.ParamType[tuple[int, ...]]):
    """Numbers of workers, separated by commas; ``...`` goes on as the two before it."""

    name = "counts"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        counts: list[int] = []
        parts = [part.strip() for part in str(value).split(",")]
        for index, part in enumerate(parts):
            if part == "..." and len(counts) >= 2 and index == len(parts) - 2:
                counts += self._between(counts[-2], counts[-1], self._count(parts[-1]))
            else:
                counts.append(self._count(part))
        return tuple(sorted(set(counts)))

    def _between(self, before: int, last: int, end: int) -> list[int]:
        """What lies between ``last`` and ``end`` if every count is as many times the last."""
        factor, rest = divmod(last, before)
        if rest or factor < 2:
            self.fail(f"'...' goes on by a whole factor, which {before},{last} does not have")
        counts = []
        while (last := last * factor) < end:
            counts.append(last)
        return counts

    def _count(self, text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MOST_WORKERS:
            self.fail(f"{text!r} is no number of workers from 1 to {MOST_WORKERS}")
        return int(text)


@click.command("simulate", short_help="Predict it for other numbers of workers.")
@model_arguments
@click.option(
    "--workers",
    type=_Counts(),
    metavar="P,P,...",
    default=DEFAULT_WORKERS,
    help="Numbers of workers; 4,8,...,2048 fills the gap.  [default: 4,8,...,2048]",
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
    type=_Names(),
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
@click.option("--per-link", is_flag=True, help="COST is one hop over one link instead.")
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
@click.option("--plot", metavar="FILE.html", help="Also write an interactive plot.")
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
    plot: str | None,
    as_json: bool,
) -> None:
    """Predict the iteration on other numbers of workers, the batch of each being the same.

    TRACE and COST are files, examples (wfbp traces), or one directory of a recorded run for both.
    COST is taken apart into what one link costs, and put together again for every number of workers
    by the cost model of the algorithm. Curves become their best line on the way.
    """
    factor = 2.0 * max(workers) * max(1.0, 1.0 / node_speed)
    loaded = load(trace, cost, factor, optimizer)
    model, costs = loaded.trace, loaded.costs
    if cost is None and (measured_on is not None or per_link):
        raise click.UsageError(
            f"the run says itself that its costs are those among {loaded.measured_on} ranks; leave "
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
    if plot is not None:
        _plot(plot, model, rows)
    if as_json:
        click.echo(json.dumps(_document(model, algorithm, rows), indent=1, allow_nan=False))
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


def _document(trace: Trace, algorithm: str, rows: Sequence[SweepRow]) -> dict[str, Any]:
    return {
        "model": trace.model,
        "algorithm": algorithm,
        "results": [
            asdict(row)
            | {
                "exposed_s": max(0.0, row.iteration_s - row.compute_s),
                "ratio_to_lower_bound": ratio_to_lower_bound(row.iteration_s, row.lower_bound_s),
                "efficiency": row.efficiency,
                "speedup": row.speedup,
            }
            for row in rows
        ],
    }


def _plot(path: str, trace: Trace, rows: Sequence[SweepRow]) -> None:
    from wfbp.cli.figures.scaling import scaling
    from wfbp.cli.page import Chapter, Section, write_page

    text = "1.0 where all communication is hidden; the batch per worker stays the same."
    section = Section("Efficiency by workers", text, scaling({rows[0].algorithm: rows}))
    write_page(path, f"wfbp simulate: {trace.model}", [Chapter(sections=[section])])


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

"""``wfbp timeline``: the timelines of all ranks as one file, and what steps took."""

from __future__ import annotations

import json
from pathlib import Path

import click

from wfbp.cli.tables import Column, print_table
from wfbp.runtime.timeline import load, merge, save, summarize

MERGED = "timeline.json"


@click.command("timeline", short_help="Merge all ranks' timelines, and sum up their steps.")
@click.argument(
    "places", metavar="FOLDER|FILE...", nargs=-1, required=True, type=click.Path(exists=True)
)
@click.option(
    "--output", metavar="FILE", help=f"Where the merged file goes  [default: FOLDER/{MERGED}]."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(places: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Merge the timelines of all ranks, and tell what their steps took.

    FOLDER is what WFBP_TIMELINE was set to while training; files are what start_timeline() wrote on
    several ranks. The merged file opens in Perfetto
    (https://ui.perfetto.dev) and chrome://tracing. Where a job ended well, rank 0 has merged them
    already; a job that was killed has left the ranks' files, which this merges.
    """
    folder = Path(places[0])
    paths = [Path(place) for place in places]
    if folder.is_dir():
        paths = sorted(folder.glob("timeline.rank*.json"))
        if not paths:
            raise ValueError(f"{folder}: no timelines; expected files such as timeline.rank0.json")
    else:
        folder = folder.parent
    by_rank = [load(path) for path in paths]
    document = merge(by_rank)
    target = Path(output) if output else folder / MERGED
    save(document, target)
    rows = summarize(document)
    stepped = {row["rank"] for row in rows}
    empty = [
        path.name
        for path, own in zip(paths, by_rank, strict=True)
        if stepped.isdisjoint(event["pid"] for event in own["traceEvents"])
    ]
    if as_json:
        click.echo(json.dumps({"file": str(target), "ranks": rows, "without_steps": empty}))
        return
    print_table(
        f"Medians of {len(paths) - len(empty)} timelines, in ms",
        [
            Column("rank"),
            Column("optimizer", "left", below=True),
            Column("steps"),
            Column("iteration"),
            Column("forward"),
            Column("backward"),
            Column("update"),
            Column("exposed"),
            Column("sending"),
            Column("hidden"),
        ],
        [
            [
                str(row["rank"]),
                row["optimizer"],
                str(row["steps"]),
                *(_milliseconds(row[key]) for key in _TIMES),
                "-" if row["hidden"] is None else f"{row['hidden']:.0%}",
            ]
            for row in rows
        ],
        [
            "exposed: training waits for communication; hidden: the part of sending that holds",
            "nothing up. Where forward is 0, backward has both.",
            *(
                f"{name} holds no complete step: its rank was killed, or it was cut"
                for name in empty
            ),
            str(target),
        ],
    )


_TIMES = (
    "iteration_s",
    "forward_s",
    "backward_s",
    "update_s",
    "exposed_s",
    "communication_s",
)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"

"""``wfbp timeline``: merges the timelines of all ranks, and summarizes their steps."""

from __future__ import annotations

import json
from pathlib import Path

import click

from wfbp.cli.inputs import json_option
from wfbp.cli.tables import print_table
from wfbp.core.ranks import counted

MERGED = "timeline.json"
_WHY_EMPTY = "its rank was killed, the file was cut, or the job had one rank"
_TIMES = ("iteration", "forward", "backward", "update", "exposed", "communication")


@click.command("timeline", short_help="Merge all ranks' timelines, and sum up their steps.")
@click.argument(
    "places", metavar="FOLDER|FILE...", nargs=-1, required=True, type=click.Path(exists=True)
)
@click.option("--output", metavar="FILE", help=f"Merged file  [default: FOLDER/{MERGED}].")
@json_option
def command(places: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """Merge the timelines of all ranks, and summarize their steps.

    FOLDER is the value of WFBP_RECORD during training; files are those of start_timeline() on
    several ranks. The merged file opens in Perfetto (https://ui.perfetto.dev) and chrome://tracing.
    At a normal end of a job rank 0 merges them; this merges the files of a killed job.
    """
    from wfbp.runtime.timeline_files import load, merge, save, summarize

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
    cells = []
    for row in rows:
        times = [row[f"{name}_s"] for name in _TIMES]
        shown = ["-" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in times]
        hidden = "-" if row["hidden"] is None else f"{row['hidden']:.0%}"
        steps = f"{row['first_step']}-{row['last_step']}"
        cells.append([str(row["rank"]), row["optimizer"], steps, *shown, hidden])
    print_table(
        f"Medians of {counted(len(paths) - len(empty), 'timeline')}, in ms",
        ("rank", "<optimizer", "steps", *_TIMES[:-1], "sending", "hidden"),
        cells,
        [
            "steps: those by the last plan, without its trial; exposed: training waits for",
            "communication; hidden: the part of sending that delays nothing. If forward is 0,",
            "backward has both.",
            *(f"{name} holds no complete step: {_WHY_EMPTY}" for name in empty),
            str(target),
        ],
    )

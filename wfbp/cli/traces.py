"""``wfbp traces``: the example traces and costs that come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from wfbp.cli.inputs import EXAMPLE_COSTS, EXAMPLE_TRACES, json_option
from wfbp.cli.tables import milliseconds, print_table, size
from wfbp.core.trace import Trace


@click.command("traces", short_help="List the example traces, or write them as files.")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--output", metavar="DIR", help="Write the named ones, or all, as files there.")
@json_option
def command(names: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """List the example traces and costs, or write them as files.

    wfbp plan and wfbp simulate accept their names: wfbp plan resnet-50 --cost 10gbe-16.
    """
    traces = {path.stem: path for path in sorted(EXAMPLE_TRACES.glob("*.json"))}
    costs = {path.stem: path for path in sorted(EXAMPLE_COSTS.glob("*.json"))}
    known = traces | costs
    for name in names:
        if name not in known:
            raise click.UsageError(f"{name!r} is not known; known are {', '.join(known)}")
    if output is not None:
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names or known:
            target = folder / f"{name}.json"
            target.write_bytes(known[name].read_bytes())
            click.echo(target)
        return
    rows: list[dict[str, Any]] = []
    for name in [name for name in traces if not names or name in names]:
        trace, data = Trace.load(traces[name]), json.loads(traces[name].read_bytes())
        rows.append(
            {
                "name": name,
                "model": trace.model,
                "num_tensors": len(trace.tensors),
                "total_bytes": sum(trace.backward_bytes),
                "compute_s": trace.forward_s + trace.backward_s,
                "times": str(data.get("total_source") or data.get("note", "")),
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    print_table(
        "Example traces; compute in ms, without communication",
        ("<name", "<model", "tensors", "size", "compute", "<times"),
        [
            (
                row["name"],
                row["model"],
                str(row["num_tensors"]),
                size(row["total_bytes"]),
                milliseconds(row["compute_s"]),
                row["times"],
            )
            for row in rows
        ],
        [f"costs: {', '.join(costs)}; as in: wfbp plan resnet-50 --cost 10gbe-16"],
    )

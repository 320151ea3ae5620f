"""``wfbp traces``: the example traces and costs that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import click

from wfbp.cli.inputs import EXAMPLE_COSTS, EXAMPLE_TRACES, json_option
from wfbp.cli.tables import Column, milliseconds, print_table, size
from wfbp.core.trace import Trace


@click.command("traces", short_help="List the example traces, or write them as files.")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--output", metavar="DIR", help="Write the named ones, or all, as files there.")
@json_option
def command(names: tuple[str, ...], output: str | None, as_json: bool) -> None:
    """List the example traces, or write them as files.

    wfbp plan and wfbp simulate know them by name: wfbp plan resnet-50 --cost 10gbe-16. The
    examples of costs are listed below the traces, and can be written, too.
    """
    traces, costs = _examples(EXAMPLE_TRACES), _examples(EXAMPLE_COSTS)
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
    chosen = {name: path for name, path in traces.items() if not names or name in names}
    rows = [(name, Trace.load(path), _source(path)) for name, path in chosen.items()]
    if as_json:
        click.echo(json.dumps([_plain(*row) for row in rows], indent=1))
        return
    print_table(
        "Example traces; compute in ms, without communication",
        (
            Column("name", "left"),
            Column("model", "left", below=True),
            Column("tensors"),
            Column("size"),
            Column("compute"),
            Column("times", "left", below=True),
        ),
        [
            (
                name,
                trace.model,
                str(len(trace.tensors)),
                size(sum(trace.backward_bytes)),
                milliseconds(trace.forward_s + trace.backward_s),
                source,
            )
            for name, trace, source in rows
        ],
        [f"costs: {', '.join(costs)}; as in: wfbp plan resnet-50 --cost 10gbe-16"],
    )


def _examples(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def _source(path: Path) -> str:
    """Where the compute times come from, as the file says."""
    data = json.loads(path.read_bytes())
    return str(data.get("total_source") or data.get("note", ""))


def _plain(name: str, trace: Trace, source: str) -> dict[str, object]:
    return {
        "name": name,
        "model": trace.model,
        "num_tensors": len(trace.tensors),
        "total_bytes": sum(trace.backward_bytes),
        "compute_s": trace.forward_s + trace.backward_s,
        "times": source,
    }

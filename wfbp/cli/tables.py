"""Tables for people. The only place that imports rich, and it does so when a table is printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 250
"""Where output goes to a pipe or a file nothing is cut; a table is as wide as its cells."""


class Column(NamedTuple):
    """Heading, side on which cells stand, whether it may be cut where space is short."""

    heading: str
    justify: Literal["left", "right"] = "right"
    cut: bool = False


def print_table(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    best: int | None = None,
) -> None:
    """Print a table.

    Args:
        title: above it.
        columns: what stands in each.
        rows: cells as text, printed as they are.
        notes: lines below it.
        best: index of the row that stands out.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = console()
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for place, column in enumerate(columns):
        widest = max((len(row[place]) for row in rows), default=0)
        table.add_column(
            column.heading,
            justify=column.justify,
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if column.cut else max(widest, len(column.heading)),
        )
    for index, row in enumerate(rows):
        style = "bold green" if index == best else ""
        table.add_row(*(Text(cell) for cell in row), style=style)
    out.print(table)
    for note in notes:
        out.print(Text(note))


def console() -> Console:
    """Where tables and plots go."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, to a microsecond.

    >>> milliseconds(0.0123456)
    '12.346'
    """
    return f"{seconds * 1e3:,.3f}"


def size(nbytes: float) -> str:
    """Bytes in the unit that suits them.

    >>> size(1536), size(40), size(25 * 2**20)
    ('1.5 KiB', '40 B', '25.0 MiB')
    """
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:,.1f} TiB"

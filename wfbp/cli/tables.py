"""Tables for people; imports rich only to print one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 250
"""Width of a pipe or a file; tables are wider if they need to be."""
_FOLDED = 24
"""Least width of a text column before a table is split."""


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    best: int | None = None,
) -> None:
    """Print a table; ``<`` before a heading marks a column of text, aligned on the left.

    If it is too wide, fold texts, then split it into several tables that repeat the first column.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    out = console()
    is_text = [heading.startswith("<") for heading in headings]
    headings = [heading.removeprefix("<") for heading in headings]
    rows = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    widths = [3 + max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    if not sys.stdout.isatty():
        out.width = max(out.width, sum(widths) + 1)
    least = [min(w, _FOLDED) if text else w for w, text in zip(widths, is_text, strict=True)]
    blocks = [[0]]
    for place in range(1, len(headings)):
        if len(blocks[-1]) > 1 and sum(least[k] for k in [*blocks[-1], place]) >= out.width:
            blocks.append([0])
        blocks[-1].append(place)
    out.print(Text(title, style="bold"))
    for block in blocks:
        table = Table(box=box.SIMPLE_HEAD)
        for k in block:
            side: Literal["left", "right"] = "left" if is_text[k] else "right"
            table.add_column(headings[k], justify=side, no_wrap=not is_text[k], overflow="fold")
        for index, row in enumerate(rows):
            style = "bold green" if index == best else ""
            table.add_row(*(Text(row[place]) for place in block), style=style)
        out.print(table)
    for note in notes:
        out.print(Text(note), soft_wrap=True)  # commands and paths can be copied


def console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, to a microsecond."""
    return f"{seconds * 1e3:,.3f}"


def size(nbytes: float) -> str:
    """Bytes in a suitable unit, as 40 B or 1.5 KiB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    value = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:,.1f} TiB"

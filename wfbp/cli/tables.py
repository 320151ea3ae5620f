"""Tables for people; imports rich only to print one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 250
"""Width of a pipe or a file; tables are wider if they need to be."""
FOLDED = 24
"""The narrowest that a column of text becomes in a terminal."""


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    best: int | None = None,
) -> None:
    """Print a table; ``<`` before a heading marks a column of text, aligned on the left.

    In a terminal texts are folded to fit; numbers never are.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    rows = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD)
    needed = 1
    for heading, *cells in zip(headings, *rows, strict=True):
        name = heading.removeprefix("<")
        side: Literal["left", "right"] = "right" if name == heading else "left"
        width = max(map(cell_len, (name, *cells)))
        if side == "left" and sys.stdout.isatty():
            width = min(width, FOLDED)
        needed += width + 3
        table.add_column(name, justify=side, min_width=width, overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(*map(Text, row), style="bold green" if index == best else "")
    out = console()
    out.size = (max(out.width, needed), out.height)
    out.print(Text(title, style="bold"))
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

"""Tables for people; imports rich only to print one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

PIPE_WIDTH = 250
"""Width of a pipe or a file; tables are wider if they need to be."""
FOLDED = 16
"""The narrowest that a column of text becomes in a terminal."""
GAP = 3
"""Columns of the terminal between two of a table."""


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    best: int | None = None,
) -> None:
    """Print a table; ``<`` before a heading marks a column of text, aligned on the left.

    In a terminal texts are folded to fit; numbers never are. Columns that do not fit beside the
    others follow in a further table, after the first column.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    in_terminal = sys.stdout.isatty()
    out = Console(width=None if in_terminal else PIPE_WIDTH, highlight=False)
    columns = list(zip(headings, *rows, strict=True))
    widths = []
    for heading, *cells in columns:
        width = max(map(cell_len, (heading.removeprefix("<"), *cells)))
        is_text = heading.startswith("<") and in_terminal
        widths.append(min(width, FOLDED) if is_text else width)
    parts: list[list[int]] = [[0]]
    for index in range(1, len(columns)):
        needed = sum(widths[k] + GAP for k in [*parts[-1], index])
        if in_terminal and needed > out.width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(index)
    out.print(Text(title, style="bold"))
    for part in parts:
        table = Table(box=box.SIMPLE_HEAD)
        for k in part:
            name = headings[k].removeprefix("<")
            side: Literal["left", "right"] = "right" if name == headings[k] else "left"
            table.add_column(name, justify=side, min_width=widths[k], overflow="fold")
        for index, row in enumerate(rows):
            style = "bold green" if index == best else ""
            table.add_row(*(Text(row[k]) for k in part), style=style)
        needed = sum(widths[k] + GAP for k in part) + 1
        out.size = (max(out.width, needed), out.height)
        out.print(table)
    for note in notes:
        out.print(Text(note), soft_wrap=True)  # commands and paths can be copied


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, to a microsecond."""
    return f"{seconds * 1e3:,.3f}"


def short_milliseconds(seconds: float) -> str:
    """Seconds as milliseconds with three digits or more, as 1.25 ms or 1,024 ms."""
    value = seconds * 1e3
    return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


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

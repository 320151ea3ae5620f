"""Tables for people. The only place that imports rich, and it does so when a table is printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 250
"""Where plots and notes are wrapped that go to a pipe or a file; tables there are never split."""

GAP = 3
"""Between columns."""


class Column(NamedTuple):
    """Heading, and side on which cells stand.

    Where a table is wider than the terminal, the cells of a column with ``below`` (names, reasons)
    go below their row, whole.
    """

    heading: str
    justify: Literal["left", "right"] = "right"
    below: bool = False


def print_table(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    best: int | None = None,
) -> None:
    """Print a table; nothing of it is cut. ``best`` is the index of the highlighted row.

    Cells that do not fit the terminal go below their row where the column allows it, and else into
    further tables, each of which begins with the first column.
    """
    from rich.cells import cell_len
    from rich.text import Text

    out = console()
    rows = [[" ".join(cell.splitlines()) for cell in row] for row in rows]
    widths = [
        max(cell_len(text) for text in (column.heading, *(row[place] for row in rows)))
        for place, column in enumerate(columns)
    ]
    limit = out.width if sys.stdout.isatty() else sys.maxsize
    shown = list(range(len(columns)))
    if _width(widths) > limit:
        shown = [place for place in shown if not columns[place].below]
    below = [place for place in range(len(columns)) if place not in shown]
    out.print(Text(title, style="bold"))
    blocks = _blocks([widths[place] for place in shown], limit)
    for number, block in enumerate(blocks):
        places = [shown[index] for index in block]
        headings = [column.heading for column in columns]
        hanging = [
            ": ".join(row[place] for place in below) if number == len(blocks) - 1 else ""
            for row in (headings, *rows)
        ]
        _print_block(
            out,
            [columns[place] for place in places],
            [[row[place] for place in places] for row in rows],
            hanging,
            best,
        )
    for note in notes:
        out.print(Text(note))


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * len(widths) + 1


def _blocks(widths: Sequence[int], limit: int) -> list[list[int]]:
    """Which columns stand side by side; the first is in every block.

    >>> _blocks([5, 10, 10, 10], 36)
    [[0, 1, 2], [0, 3]]
    """
    blocks = [[0]]
    for place in range(1, len(widths)):
        longer = [*blocks[-1], place]
        if len(longer) > 2 and _width([widths[k] for k in longer]) > limit:
            blocks.append([0, place])
        else:
            blocks[-1] = longer
    return blocks


def _print_block(
    out: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    hanging: Sequence[str],
    best: int | None,
) -> None:
    """Columns side by side; below headings and rows a text each, which may be empty."""
    from rich import box
    from rich.padding import Padding
    from rich.segment import Segment, Segments
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    for index, row in enumerate(rows):
        style = "bold green" if index == best else ""
        table.add_row(*(Text(cell) for cell in row), style=style)
    options = out.options.update(width=max(out.width, 10_000))  # a terminal wraps what is too long
    lines = out.render_lines(table, options, pad=False)
    num_head = len(lines) - len(rows) - 1
    for number, line in enumerate(lines):
        out.print(Segments([*line, Segment.line()]), end="", crop=False, soft_wrap=True)
        place = number - num_head + 1
        if 0 <= place < len(hanging) and hanging[place]:
            style = "" if place else "bold"
            out.print(Padding(Text(hanging[place], style=style), (0, 0, 0, 6)))


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

"""Tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from wfbp.cli.tables import console


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header; the first column is left-aligned, the others right."""
    table = Table(title=title, title_justify="left")
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    console().print(table)

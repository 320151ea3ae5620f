"""``python -m tests.benchmarks validation``: the model against published measurements and claims.

Prints every table of validation.md. ``--update FILE`` puts them into that page instead, each
between its marks ``<!-- table NAME -->`` and ``<!-- end NAME -->``; the text around them is kept.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.scaling import DATA
from tests.benchmarks.validation.tables import TABLES


def updated(page: str, tables: Mapping[str, str]) -> str:
    """The page with these tables in place of those that it has.

    Raises:
        ValueError: the page has no place for one of them.
    """
    for name, table in tables.items():
        marks = re.compile(f"(<!-- table {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        found = marks.search(page)
        if found is None:
            raise ValueError(f"no place for table {name!r}: <!-- table {name} --> and its end")
        page = f"{page[: found.end(1)]}\n{table}\n\n{page[found.start(2) :]}"
    return page


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks validation", description=__doc__
    )
    parser.add_argument("--only", action="append", choices=TABLES, help="this table; repeatable")
    parser.add_argument("--update", type=Path, metavar="FILE", help="the page to write them into")
    arguments = parser.parse_args(argv)
    if not DATA.is_dir():
        parser.error(f"needs the published data of a source checkout, and there is no {DATA}")
    tables = {name: TABLES[name]() for name in arguments.only or TABLES}
    if arguments.update is None:
        for name, table in tables.items():
            print(f"## {name}: {TABLES[name].__doc__}\n\n{table}\n")
        return 0
    try:
        arguments.update.write_text(updated(arguments.update.read_text(), tables))
    except (OSError, ValueError) as error:
        parser.error(f"{arguments.update}: {error}")
    return 0

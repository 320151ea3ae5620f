"""The code that the documentation shows: blocks of Python, and commands."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

PROGRAMS = ("tutorials/",)
"""Pages whose blocks of Python are one program, in their order."""
WITH_DIFFS = ("how-to/move-from-ddp.md",)
"""Pages whose blocks of ``diff`` are whole programs, before and after."""


class Snippet(NamedTuple):
    """Python of a page: a block, or all blocks of a page that is one program."""

    name: str
    source: str


def pages() -> list[Path]:
    """All Markdown that users read, as paths from the root of the sources."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return [path.relative_to(ROOT) for path in (ROOT / "README.md", *docs)]


def fenced(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    text = (ROOT / page).read_text()
    blocks = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in blocks]


def snippets() -> list[Snippet]:
    """All Python of all pages, notebooks left out: Sphinx executes those.

    Of the pages in :data:`WITH_DIFFS` they are the programs after the changes.
    """
    made = []
    for page in pages():
        blocks = fenced(page, "python")
        within = page.as_posix().removeprefix("docs/")
        if within in WITH_DIFFS:
            programs = range(len(fenced(page, "diff")))
            made += [Snippet(f"{within}#{k}", Diff.of(page, k).after) for k in programs]
        if blocks and within.startswith(PROGRAMS):
            made.append(Snippet(within, "\n".join(blocks)))
        else:
            made += [Snippet(f"{within}:{k}", block) for k, block in enumerate(blocks, 1)]
    return made


class Diff(NamedTuple):
    """A page's block of ``diff``: two programs, and the changed lines."""

    before: str
    after: str
    changes: list[str]

    @classmethod
    def of(cls, page: Path, number: int = 0) -> Diff:
        """Read it from the page; blocks are counted from 0."""
        lines = fenced(page, "diff")[number].splitlines()
        removed, added = ([line for line in lines if line[:1] != sign] for sign in "+-")
        before, after = ("".join(f"{line[1:]}\n" for line in side) for side in (removed, added))
        return cls(before, after, [line for line in lines if line[:1] in ("+", "-")])


def commands() -> list[tuple[str, str]]:
    """Page and text of every command shown, in fenced blocks of ``console`` and indented ones.

    Options of a command may go on in its next line.
    """
    made = []
    for page in pages():
        language = ""
        for line in re.sub(r"\\\n\s*", "", (ROOT / page).read_text()).splitlines():
            if fence := re.match(r" *```(\S*)", line):
                language = "" if language else fence[1] or "text"
            elif command := command_of(line, language):
                made.append((page.as_posix(), command))
    return made


def command_of(line: str, language: str) -> str:
    """The command of a line, if it is one, in a fenced block of this language or in none ("").

    A line of an indented block is a command if it begins with a prompt or with the name of a
    program that the documentation uses.
    """
    shown = line.strip()
    if language not in ("", "console") or not (language or line.startswith("    ")):
        return ""
    if shown.startswith("$ "):
        shown = shown[2:]
    elif language or not re.match(BEGINNINGS, shown):
        return ""
    return re.sub(r"\s+#\s.*", "", shown).strip()


BEGINNINGS = (
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:wfbp (?!\s|\w+: error)|"
    r"(?:wfbprun|mpirun|make|pip|python3?|docker|kubectl|sbatch|qsub|bsub)\s)"
)

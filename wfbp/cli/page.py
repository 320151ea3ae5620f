"""One HTML page that holds everything it needs, and a policy that lets it fetch nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template

from wfbp.cli.figures import Figure


@dataclass(frozen=True, slots=True)
class Section:
    """A figure with its heading, and one or two sentences that explain it."""

    heading: str
    explanation: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Chapter:
    """Figures of one subject.

    Args:
        heading: text; none if empty.
        verdict: the main result, in one sentence of text; none if empty.
        facts: pairs of name and value, as text.
        notes: what the reader must know, as text.
        sections: in order.
    """

    heading: str = ""
    verdict: str = ""
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    sections: Sequence[Section] = field(default_factory=list)


def library() -> str:
    """The source of what draws the figures."""
    return resources.files("wfbp.cli").joinpath("plot.js").read_text(encoding="utf-8")


def write_page(path: str, title: str, chapters: Sequence[Chapter]) -> None:
    """Write an HTML page, replacing the file."""
    try:
        Path(path).write_text(page(title, chapters), encoding="utf-8")
    except OSError as error:  # that of a full disk names no file
        raise OSError(error.errno, error.strerror, str(path)) from None


def page(title: str, chapters: Sequence[Chapter]) -> str:
    """The page as text; everything given is escaped."""
    figures: dict[str, Figure] = {}
    body = "\n".join(_chapter(chapter, figures) for chapter in chapters)
    template = resources.files("wfbp.cli").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=html.escape(title),
        body=body,
        library=library(),
        # "</script>" in a name would end the script; "<!--" would swallow what follows.
        figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
    )


_LONG = 60
"""A fact of more letters has a row of its own."""


def _chapter(chapter: Chapter, figures: dict[str, Figure]) -> str:
    parts = [f"<h2>{html.escape(chapter.heading)}</h2>"] if chapter.heading else []
    if chapter.verdict:
        parts.append(f'<p class="verdict">{html.escape(chapter.verdict)}</p>')
    if chapter.facts:
        cells = (
            f"<div{' class=wide' if len(value) > _LONG else ''}>"
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
            for name, value in chapter.facts
        )
        parts.append(f"<dl>{''.join(cells)}</dl>")
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in chapter.notes]
    for section in chapter.sections:
        key = f"figure{len(figures)}"
        figures[key] = section.figure
        parts.append(
            f"<section><h3>{html.escape(section.heading)}</h3>"
            f"<p>{html.escape(section.explanation)}</p>"
            f'<div class="figure" id="{key}"></div></section>'
        )
    return "\n".join(parts)

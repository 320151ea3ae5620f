"""One self-contained HTML page, with a content policy that forbids it to load anything."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple

from wfbp.cli.figures import Figure

_LONG = 60  # a fact of more letters has its own row


class Chapter(NamedTuple):
    """Figures of one subject; the verdict is the main result in one sentence.

    Sections are a heading, one or two sentences that explain the figure, and the figure.
    """

    heading: str = ""
    verdict: str = ""
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    sections: Sequence[tuple[str, str, Figure]] = ()


def library() -> str:
    """The source of the script that draws the figures."""
    return Path(__file__).with_name("plot.js").read_text(encoding="utf-8")


def write_page(path: str, title: str, chapters: Sequence[Chapter]) -> None:
    """Write an HTML page, replacing the file; all text is escaped."""
    figures: dict[str, Figure] = {}
    body = "\n".join(_chapter(chapter, figures) for chapter in chapters)
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    text = Template(template).substitute(
        title=html.escape(title),
        body=body,
        library=library(),
        # "</script>" in a name would end the script; "<!--" would swallow what follows.
        figures=json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk's error names no file
        raise OSError(error.errno, error.strerror, str(path)) from None


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
    for heading, explanation, figure in chapter.sections:
        key = f"figure{len(figures)}"
        figures[key] = figure
        parts.append(
            f"<section><h3>{html.escape(heading)}</h3><p>{html.escape(explanation)}</p>"
            f'<div class="figure" id="{key}"></div></section>'
        )
    return "\n".join(parts)

"""One self-contained HTML page, with a content policy that forbids it to load anything."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from plotly.offline import get_plotlyjs


class Chapter(NamedTuple):
    """Figures of one subject; the verdict is the main result in one sentence.

    Sections are a heading, one or two sentences that explain the figure, and Plotly's figure.
    """

    heading: str = ""
    verdict: str = ""
    facts: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    sections: Sequence[tuple[str, str, Any]] = ()


def write_page(path: str, title: str, chapters: Sequence[Chapter]) -> None:
    """Write an HTML page, replacing the file; all text is escaped."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    text = Template(template).substitute(
        title=escape(title),
        library=get_plotlyjs(),
        body="\n".join(part for chapter in chapters for part in _parts(chapter)),
    )
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk's error names no file
        raise OSError(error.errno, error.strerror, str(path)) from None


def _parts(chapter: Chapter) -> list[str]:
    parts = [f"<h2>{escape(chapter.heading)}</h2>", f"<p><b>{escape(chapter.verdict)}</b></p>"]
    rows = (f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in chapter.facts)
    parts += ["<table>", *rows, "</table>"]
    parts += [f"<p>{escape(note)}</p>" for note in chapter.notes]
    for heading, explanation, figure in chapter.sections:
        parts += [f"<h3>{escape(heading)}</h3>", f"<p>{escape(explanation)}</p>"]
        settings = {"responsive": True, "displaylogo": False}
        parts.append(figure.to_html(settings, full_html=False, include_plotlyjs=False))
    return parts

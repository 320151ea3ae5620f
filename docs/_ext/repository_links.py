"""Lets pages link to files of the checkout, as ``../examples/torch_gpt.py``.

On the site such a link leads to the repository; a file that does not exist is a warning.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from project import ROOT, repository_url
from sphinx.application import Sphinx
from sphinx.util import logging

LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
"""The target of a Markdown link that begins by going up."""


def rewrite(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the links of one page that leave ``docs/``."""
    folder = Path(app.srcdir, docname).parent

    def target(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        if path.is_relative_to(app.srcdir):
            return match[0]
        if not path.exists():
            warning = "no such file in the checkout: %s"
            logging.getLogger(__name__).warning(warning, match[1], location=docname)
        kind = "tree" if path.is_dir() else "blob"
        return f"]({repository_url}/{kind}/main/{path.relative_to(ROOT).as_posix()}"

    source[0] = LINK.sub(target, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}

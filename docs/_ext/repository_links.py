"""Lets pages link to files of the checkout, as ``../examples/torch_gpt.py``.

On the site such a link leads to the repository. Without an address, the file's path replaces it. A
file that does not exist is a warning.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from project import ROOT, repository_url
from sphinx.application import Sphinx
from sphinx.util import logging

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)\)")
"""A Markdown link whose target begins by going up: its text and its target."""


def rewrite(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the links of one page that leave ``docs/``."""
    folder = Path(app.srcdir, docname).parent

    def target(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[2]))
        if path.is_relative_to(app.srcdir):
            return match[0]
        if not path.exists():
            warning = "no such file in the checkout: %s"
            logging.getLogger(__name__).warning(warning, match[2], location=docname)
        name = path.relative_to(ROOT).as_posix()
        if not repository_url:
            return f"`{name}`" if match[1] in name else f"{match[1]} (`{name}`)"
        kind = "tree" if path.is_dir() else "blob"
        return f"[{match[1]}]({repository_url}/{kind}/main/{name})"

    source[0] = LINK.sub(target, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", rewrite)
    return {"parallel_read_safe": True}

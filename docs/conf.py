"""How Sphinx builds the documentation: ``make docs`` writes it to ``build/docs``.

Pages are Markdown (MyST), which repositories show as it is; the reference comes from docstrings.
Warnings are errors: a link to a page, a heading or a name that does not exist ends the build, and
so does a public name without a docstring (``public_names.py``).
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

from project import release  # noqa: E402 - needs the path above

project = "wfbp"
author = "the wfbp authors"
version = release

extensions = [
    "myst_nb",  # Markdown, and pages whose code is executed
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",  # "Args:" and "Returns:" in docstrings
    "sphinx_copybutton",
    "mathml",
    "public_names",
    "repository_links",
]

html_theme = "furo"
html_title = f"wfbp {version}"
html_static_path = ["_static"]
html_css_files = ["wfbp.css"]
html_math_renderer_name = "mathml"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4  # headings can be linked to as on a repository's pages
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 60
nb_execution_show_tb = True

copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
highlight_language = "text"  # blocks without a language are commands and what they print

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

nitpicky = True
nitpick_ignore_regex = [
    # Types of other packages: their documentation is elsewhere, and the build needs no network.
    (
        "py:.*",
        r"(collections|contextlib|enum|jax|jaxlib|mpi4py|np|numpy|optax|os|pathlib|torch|types"
        r"|typing)\..*",
    ),
    # In signatures: type variables and aliases, and classes that no program names.
    (
        "py:(class|obj)",
        r"(wfbp\..*\.)?(F|T|Tree|Choice|Outer|Hook|HostBackend|Collectives|HasStats|Numbers|_Work"
        r"|npt\.NDArray|HorovodOp|[A-Za-z0-9]+Compressor)",
    ),
]

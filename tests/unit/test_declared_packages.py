"""Packages are declared where they are used: by extras, by pages and by examples.

``python -m tests.outside.pages`` runs all of this in environments that hold nothing else.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.outside.pages import Needs, example_needs, lines_with_needs, tasks
from tests.support.run_documents import record
from tests.support.snippets import ROOT, fenced, pages, snippets

tomllib: Any = pytest.importorskip("tomllib")  # Python 3.11

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_FOR_USERS = {"docs", "release", "dev"}
OPTIONAL = {"horovod"}
"""Of another project: a contestant of ``wfbp bench``, left out where it is missing."""
BRINGS = {"cupy": "cupy-cuda12x", "torchmetrics": "lightning"}
"""Packages that tests do without: a module, and what installs it."""
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROVIDERS = metadata.packages_distributions()


def imports(source: str) -> Iterator[str]:
    """The packages that a program imports, at its top or within functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]


def foreign(sources: Iterable[str], *own: str) -> set[str]:
    """Of other projects."""
    every = {name for source in sources for name in imports(source)}
    return every - set(sys.stdlib_module_names) - {"wfbp", *own}


def installed_by(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements bring, as far as they are installed here."""
    brought: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        key = f"{canonicalize_name(wanted.name)} {sorted(wanted.extras)}"
        if key in brought:
            continue
        brought |= {key, canonicalize_name(wanted.name)}
        try:
            more = metadata.requires(wanted.name) or ()
        except metadata.PackageNotFoundError:
            continue
        for needed in map(Requirement, more):
            extras = wanted.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(needed)
    return brought


def requirements(needs: Needs) -> list[str]:
    """What pip is asked for."""
    extras = PROJECT["optional-dependencies"]
    own = [text for extra in needs.extras for text in extras[extra]]
    return [*PROJECT["dependencies"], *own, *needs.packages]


def missing(modules: Iterable[str], needs: Needs) -> set[str]:
    """Modules that these packages do not bring."""
    brought = installed_by(requirements(needs))
    names = {
        m: {canonicalize_name(d) for d in PROVIDERS.get(m, [BRINGS.get(m, m)])} for m in modules
    }
    return {module for module, providers in names.items() if not providers & brought}


def test_extras_declare_what_the_package_imports() -> None:
    sources = [path.read_text() for path in (ROOT / "wfbp").rglob("*.py")]
    for_users = set(PROJECT["optional-dependencies"]) - NOT_FOR_USERS
    used = foreign(sources, "cupy_backends")
    assert {"torch", "jax", "plotly", "ray"} <= used
    assert missing(used, Needs(frozenset(for_users))) == OPTIONAL


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_names_what_it_imports(path: Path) -> None:
    used = foreign([path.read_text()], *(other.stem for other in EXAMPLES))
    assert not missing(used, example_needs(path))


def test_pages_name_what_their_programs_import() -> None:
    sources = {snippet.name: snippet.source for snippet in snippets()}
    for task in tasks():
        page = Path("docs", task.page)
        if task.snippet:
            source = sources[task.snippet]
        elif not task.command:
            source = "\n".join(fenced(page, "{code-cell} ipython3"))
        else:
            continue
        assert not missing(foreign([source]), task.needs), task.name


def test_pages_name_what_their_examples_need() -> None:
    linked = set()
    for page in pages():
        for line, needs in lines_with_needs((ROOT / page).read_text()):
            # The words that install may follow the link within the paragraph.
            for name in re.findall(r"examples/(\w+\.py)$", line):
                linked.add(name)
                wanted = example_needs(ROOT / "examples" / name)
                assert wanted.extras <= needs.extras, f"{page}: {name}"
                assert wanted.packages <= needs.packages, f"{page}: {name}"
    assert linked >= {"numpy_mlp.py", "jax_mlp.py", "torch_digits.py"}


def test_every_extra_for_users_is_documented() -> None:
    text = "\n".join((ROOT / page).read_text() for page in pages())
    for extra in set(PROJECT["optional-dependencies"]) - NOT_FOR_USERS:
        assert re.search(rf"`{extra}`|\[(\w+,)*{extra}[\],]", text), extra


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from wfbp.cli.app import main
main({words})
"""


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["plan", "resnet-50", "--cost", "10gbe-16"], ""),
        (["simulate", "resnet-50", "--cost", "10gbe-16", "--workers", "4"], ""),
        (["timeline", "--help"], ""),
        (["doctor", "--no-self-test", "--json"], ""),
        (["report", "run"], "report"),
        (["bench", "training"], "torch"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_need_no_undeclared_package(words: list[str], extra: str, tmp_path: Path) -> None:
    """A sample of what runs in a new environment: all other packages are hidden."""
    brought = installed_by(PROJECT["dependencies"])
    hidden = {
        module
        for module, providers in PROVIDERS.items()
        if not {canonicalize_name(p) for p in providers} & brought
    } - {"wfbp", "__editable___wfbp_0_1_0_finder"}
    program = BLOCKER.format(hidden=sorted(hidden), words=words)
    record(tmp_path / "run")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    if extra:
        assert done.returncode == 1
        assert f"wfbp[{extra}]" in done.stderr
    else:
        assert done.returncode == 0 or words[0] == "doctor", done.stderr

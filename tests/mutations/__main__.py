"""``python -m tests.mutations [PART ...]``: plant each defect in a copy, and run its tests there.

A part is ``core``, ``runtime``, ``comm``, ``torch`` or ``jax``. The exit status is 1 where a defect
is not noticed. ``--list`` only shows what would be planted, and whether the sources still have what
a defect replaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
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


def passes(folder: Path, tests: tuple[str, ...]) -> bool:
    """Whether tests pass in a copy of the project; a copy that hangs does not."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            return False
    if status > 1:  # nothing was collected, or a usage error: no answer about the defect
        raise SystemExit(f"pytest ended with {status}: {' '.join(command)}")
    return status == 0


def planted(text: str, mutation: Mutation) -> str:
    """A file's text with the defect in it."""
    count = text.count(mutation.old)
    if count != 1:
        raise SystemExit(f"{mutation.path} has {mutation.old!r} {count} times; expected once")
    return text.replace(mutation.old, mutation.new)


def main() -> int:
    words = sys.argv[1:]
    if unknown := [word for word in words if word not in (*ALL, "--list")]:
        raise SystemExit(f"unknown: {', '.join(unknown)}\n{__doc__}")
    parts = [word for word in words if word in ALL] or list(ALL)
    mutations = [mutation for part in parts for mutation in ALL[part]]
    for mutation in mutations:
        planted((ROOT / "wfbp" / mutation.path).read_text(), mutation)
    if "--list" in words:
        for mutation in mutations:
            print(f"{mutation.path}: {mutation.old.strip()!r} -> {mutation.new.strip()!r}")
        print(f"{len(mutations)} defects")
        return 0
    survivors = []
    with tempfile.TemporaryDirectory(prefix="wfbp-mutations-") as parent:
        folder = Path(shutil.copytree(ROOT, Path(parent, "wfbp"), ignore=LEFT_OUT))
        for name in (".venv", ".venv-openmpi"):
            if (ROOT / name).exists():
                (folder / name).symlink_to((ROOT / name).resolve())
        sound = {tests: passes(folder, tests) for tests in {m.tests for m in mutations}}
        for mutation in mutations:
            file = folder / "wfbp" / mutation.path
            text = file.read_text()
            file.write_text(planted(text, mutation))
            begun = time.monotonic()
            caught = sound[mutation.tests] and not passes(folder, mutation.tests)
            file.write_text(text)
            verdict = "caught" if caught else "SURVIVES"
            if not sound[mutation.tests]:
                verdict = "its tests fail without it"
            took_s = time.monotonic() - begun
            print(
                f"{verdict:<10} {took_s:5.1f} s  {mutation.path}: {mutation.new.strip()!r}",
                flush=True,
            )
            if not caught:
                survivors.append(mutation)
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} defects are caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

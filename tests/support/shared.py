"""What the processes of one test session make once and share: results of jobs, libraries.

Tests may be shared out among processes (pytest-xdist); the processes of one session see one folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

FOLDER = "TESTS_SHARED_FOLDER"
"""Names the session's folder, to its processes and to the jobs that they start."""

SESSION = "TESTS_SESSION"
"""The session's first process, which removes the folder at its end."""

NO_ERRORS = (
    "Error reading persistent compilation cache",
    "Guards may run slower on Python 3.13.0",
)
"""Warnings as in ``pyproject.toml`` that stay warnings: JAX compiles a program itself while another
process writes it into the cache, and PyTorch's compiler likes another Python better."""


def session_folder() -> Path | None:
    """The folder of this test session; None in a process that no session started."""
    return Path(os.environ[FOLDER]) if SESSION in os.environ else None


@contextmanager
def _locked(key: str) -> Iterator[Path]:
    """The path that belongs to a key, which one process at a time looks at."""
    if FOLDER not in os.environ:  # a test program that somebody starts by hand
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="wfbp-tests-")
    path = Path(os.environ[FOLDER], hashlib.sha256(key.encode()).hexdigest()[:24])
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed
        yield path


def once(key: object, make: Callable[[], Result]) -> Result:
    """What ``make`` returns, which is called once in a session; what it raises is not kept."""
    with _locked(repr(key)) as path:
        if path.exists():
            kept: Result = pickle.loads(path.read_bytes())
            return kept
        result = make()
        path.write_bytes(pickle.dumps(result))
        return result


def compiled(command: list[str]) -> Path:
    """The shared library that a compiler's command makes, less its ``-o``; made once.

    Raises:
        AssertionError: the compiler fails or complains; with what it wrote.
    """
    with _locked(repr(command)) as path:
        library = path.with_suffix(".so")
        if not library.exists():
            done = subprocess.run(
                [*command, "-o", str(path)], capture_output=True, text=True, timeout=100
            )
            assert done.returncode == 0, done.stderr
            assert not done.stderr, done.stderr
            path.rename(library)
        return library

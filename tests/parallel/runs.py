"""Programs that run once under mpirun and answer many tests."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import launcher
from tests.support.shared import once

PROGRAMS = Path(__file__).parent / "programs"


class Outcome(NamedTuple):
    """How a program ended, and what each rank wrote (None: nothing)."""

    run: launcher.Run
    ranks: list[Any]


@functools.cache
def outcome(
    program: str,
    n: int,
    *args: object,
    mpi: str = "mpich",
    timeout: float = 100.0,
    env: tuple[tuple[str, str], ...] = (),
) -> Outcome:
    """Run ``programs/<program>.py OUT args`` once per session; it writes OUT/rank<r>.json.

    Skips the calling test where the MPI library is not installed.
    """

    def run() -> Outcome:
        with tempfile.TemporaryDirectory() as out:
            done = launcher.mpirun(
                n, PROGRAMS / f"{program}.py", out, *args, mpi=mpi, timeout=timeout, env=dict(env)
            )
            files = [Path(out, f"rank{r}.json") for r in range(n)]
            told = [json.loads(file.read_text()) if file.exists() else None for file in files]
            return Outcome(done, told)

    try:
        return once((program, n, args, mpi, timeout, env), run)
    except FileNotFoundError as error:
        pytest.skip(str(error))

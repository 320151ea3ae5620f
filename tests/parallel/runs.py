"""Programs that run once under mpirun and answer many tests."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import fork_server, launcher
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
    preloaded: str | None = None,
) -> Outcome:
    """Run ``programs/<program>.py OUT args`` once per session; it writes OUT/rank<r>.json.

    Programs below ``torch`` and ``jax`` start with these imported, or with ``preloaded``. Skips
    the calling test where the MPI library is not installed.
    """
    kind = program.partition("/")[0]
    options: dict[str, Any] = {"mpi": mpi, "timeout": timeout, "env": dict(env)}
    options["preloaded"] = preloaded or (kind if kind in fork_server.PRELOADED else None)

    def run() -> Outcome:
        with tempfile.TemporaryDirectory() as out:
            done = launcher.mpirun(n, PROGRAMS / f"{program}.py", out, *args, **options)
            files = [Path(out, f"rank{r}.json") for r in range(n)]
            told = [json.loads(file.read_text()) if file.exists() else None for file in files]
            return Outcome(done, told)

    try:
        return once((program, n, args, mpi, timeout, env), run)
    except FileNotFoundError as error:
        pytest.skip(str(error))


class Job(NamedTuple):
    """Checks of a program (``programs.harness``), one after another on the same ranks.

    Tests of several files may ask for checks of one job, which then has all of them.

    Args:
        program: below ``programs``.
        ranks: number of ranks.
        mode: of ``harness.MODES``.
        mpi: ``mpich`` or ``openmpi``.
        last: arguments behind the checks' names.
    """

    program: str
    ranks: int
    mode: str
    mpi: str = "mpich"
    last: tuple[str, ...] = ()

    def __str__(self) -> str:
        kind = "" if self.mpi == "mpich" else f"-{self.mpi}"
        return "-".join([f"{self.ranks}", self.mode, *self.last]) + kind

    def passes(self, name: str) -> None:
        """A check finds nothing wrong on any rank."""
        names = sorted(selected[self])
        found = outcome(
            self.program, self.ranks, self.mode, *names, *self.last, mpi=self.mpi, timeout=JOB_S
        )
        problems = []
        for rank, results in enumerate(found.ranks):
            assert results is not None, found.run
            assert name in results, found.run
            problems += [f"rank {rank}: {results[name]}"] if results[name] else []
        before, failed, _ = found.run.stderr.partition(f"{name} failed")
        last = before.splitlines()[-_LINES_SHOWN:] if failed else []  # such as who waited for whom
        assert not problems, "\n".join([*last, *problems])
        assert found.run.rc == 0, found.run


JOB_S = 800.0
"""A job may take so long: ten times what the longest one takes alone on two cores."""
_LINES_SHOWN = 20

selected: defaultdict[Job, set[str]] = defaultdict(set)
"""The checks of which this session has tests."""

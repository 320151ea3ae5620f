"""What the handler of a signal raises reaches the program, and ranks stay equal."""

from __future__ import annotations

import re

import pytest

from tests.parallel.programs import signals
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(240)]

DECOUPLED = (
    ("WFBP_WARMUP_STEPS", "1"),
    ("WFBP_PROFILE_STEPS", "1"),
    ("WFBP_PROBE_BUDGET_S", "0.02"),
    ("WFBP_TIMEOUT_S", "60"),
)
SOME = {
    (3, "mpich"): ("step wfbp", "step independent", "reducer", "operations"),
    (2, "openmpi"): ("step independent", "operations"),
}
"""Checks of jobs that have not all: one for each way to wait."""
PROMPT = (("WFBP_TIMEOUT_S", "100"), ("WFBP_ABORT_GRACE_S", "1"))


@pytest.mark.parametrize(
    ("n", "mpi", "name"),
    [
        *[(2, "mpich", name) for name in signals.CHECKS],
        *[(n, mpi, name) for (n, mpi), names in SOME.items() for name in names],
    ],
)
def test_handlers_that_raise(n: int, mpi: str, name: str) -> None:
    """On one rank, at any moment of what waits for the others."""
    names = SOME.get((n, mpi), signals.CHECKS)
    found = outcome(
        "signals", n, 20, *names, mpi=mpi, timeout=220, env=DECOUPLED, preloaded="torch"
    )
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert not results.get(name, "not run"), f"rank {rank}: {results}"
    assert found.run.rc == 0, found.run


@pytest.mark.parametrize("place", ["step", "reduce", "torch", "join"])
def test_an_interrupt_ends_the_job_though_another_rank_is_stuck(place: str) -> None:
    """In each kind of wait."""
    kind = "torch" if place == "torch" else None
    found = outcome("faults", 2, "interrupted", place, 1, timeout=100, env=PROMPT, preloaded=kind)
    assert found.run.rc not in (0, None), found.run
    (told,) = (line for line in found.run.stderr.splitlines() if "rank 0 of 2: Keyb" in line)
    assert re.fullmatch(
        r"wfbp: rank 0 of 2: KeyboardInterrupt at .*\.py:\d+, in (\w+|<module>)", told
    )

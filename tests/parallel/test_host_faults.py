"""Ranks that are killed or stopped while they copy out of others' memory, or may not do so."""

from __future__ import annotations

import os

import psutil
import pytest

from tests.parallel.runs import Outcome, outcome
from tests.support import launcher
from wfbp.comm.mpi.shm_memory import known_reason

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.serial,  # each looks for processes that the one before has left
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        bool(known_reason(wanted=True)), reason="ranks cannot read each other's memory"
    ),
]

ENVIRONMENT = (("WFBP_ABORT_GRACE_S", "1"),)


def ended(n: int, case: str, mpi: str) -> Outcome:
    """The job ended by itself and not well, with nothing left behind."""
    before = set(os.listdir("/dev/shm"))
    found = outcome("host_faults", n, case, mpi=mpi, timeout=100, env=ENVIRONMENT)
    assert found.run.rc not in (0, None), found.run
    left = [p for p in psutil.process_iter(["cmdline"]) if _is_rank(p.info["cmdline"])]
    _, left = psutil.wait_procs(left, timeout=60)  # one that was killed may not have gone yet
    assert not left, "processes, and so their memory, are left"
    new = set(os.listdir("/dev/shm")) - before
    assert not [name for name in new if "wfbp" in name], "MPI's own are not ours to give back"
    return found


def _is_rank(command: list[str] | None) -> bool:
    return any(part.endswith("programs/host_faults.py") for part in command or ())


@pytest.mark.parametrize(("n", "mpi"), [(3, "mpich"), (2, "openmpi")])
def test_a_rank_that_is_killed_within_a_copy(n: int, mpi: str) -> None:
    found = ended(n, "killed", mpi)
    assert found.ranks == [None] * n, "mpirun ends the others, which are still waiting"
    assert found.run.rc == launcher.KILLED[mpi], found.run


@pytest.mark.parametrize(("n", "mpi"), [(3, "mpich"), (2, "openmpi")])
def test_a_rank_that_is_stopped_within_a_copy_has_no_wrong_values(n: int, mpi: str) -> None:
    """It goes on when rank 0 has given up, and has put its buffers to other use."""
    found = ended(n, "stopped", mpi)
    *others, late = found.ranks
    assert late["kind"] == "BackendError", found.run
    assert "rank 0" in late["text"]
    assert "gave up before this rank had read what it needed from there" in late["text"]
    assert others[0]["kind"] == "StallError"
    assert f"No answer came from rank {n - 1}: stopped, killed" in others[0]["text"]


def test_where_a_rank_may_not_read_all_send_messages() -> None:
    found = outcome("host_faults", 2, "refused", env=(*ENVIRONMENT, ("WFBP_LOG_LEVEL", "info")))
    assert found.run.rc == 0, found.run
    assert [told["values"] for told in found.ranks] == [[1.5], [1.5]]
    why = "send messages (rank 1: that of rank 0 cannot be mapped: not yours)"
    lines = [line for line in found.run.stderr.splitlines() if why in line]
    assert len(lines) == 2, found.run


def test_a_forked_process_cannot_disturb_its_parent() -> None:
    """It shares the flags by which ranks tell each other how far they have come."""
    found = outcome("host_faults", 2, "forked", env=ENVIRONMENT)
    assert found.run.rc == 0, found.run
    assert [told["values"] for told in found.ranks] == [[1.5], [1.5]]
    assert "rank 1 of 2: this process was forked after wfbp.init()" in found.ranks[1]["child"]

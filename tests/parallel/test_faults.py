"""A rank that fails, leaves, dies or stops ends the job, with the reason, and never hangs it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.parallel.runs import Outcome, outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]

REASON = "ValueError: the data of this rank is broken"
GRACE = (("WFBP_ABORT_GRACE_S", "2"),)
"""For a rank that never looks."""

DECOUPLED = (
    ("WFBP_WARMUP_STEPS", "1"),
    ("WFBP_PROFILE_STEPS", "1"),
    ("WFBP_PROBE_BUDGET_S", "0.02"),
)


def ended(n: int, *case: object, **options: Any) -> Outcome:
    """The job ended by itself, long before its time limits (600 s), and not well."""
    kind = "torch" if {"torch", "busy-torch", "decoupled", "method"} & set(case) else None
    found = outcome("faults", n, *case, timeout=100, preloaded=kind, **options)
    assert found.run.rc not in (0, None), found.run
    return found


@pytest.mark.parametrize(("mpi", "who"), [("mpich", 2), ("openmpi", 1)])
def test_an_exception_reaches_ranks_that_wait_in_a_step(mpi: str, who: int) -> None:
    found = ended(3, "fail", "step", who, mpi=mpi)
    assert REASON in found.run.stderr
    for rank, caught in enumerate(found.ranks):
        if rank != who:
            assert caught["kind"] == "PeerError", found.run
            assert caught["text"] == f"rank {rank} of 3: rank {who} failed: {REASON}"


@pytest.mark.parametrize(("place", "who"), [("reduce", 0), ("wrap", 0), ("torch", 1)])
def test_an_exception_reaches_ranks_that_wait_elsewhere(place: str, who: int) -> None:
    found = ended(2, "fail", place, who)
    assert found.ranks[1 - who]["kind"] == "PeerError"
    assert f"rank {who} failed: {REASON}" in found.ranks[1 - who]["text"]
    assert found.run.stderr.count("Traceback (most") == 1, found.run  # the failing rank's
    (told,) = (line for line in found.run.stderr.splitlines() if "PeerError" in line)
    assert re.fullmatch(
        rf"wfbp: PeerError: rank {1 - who} of 2: .* \(this rank was at .*faults\.py:\d+, in \w+\)",
        told,
    )


def test_the_status_of_sys_exit_is_the_jobs(mpi: str) -> None:
    found = ended(2, "exit", "step", 1, mpi=mpi)
    assert found.ranks[0]["kind"] == "PeerError", found.run
    assert found.run.rc == 3, found.run


@pytest.mark.parametrize(
    "place", [pytest.param("compute", marks=pytest.mark.long), "sleep", "busy-torch"]
)
def test_an_exception_ends_ranks_that_never_look(place: str) -> None:
    """With one line of each; not with an error of PyTorch, whose parts MPI has ended already."""
    found = ended(3, "fail", place, 0, env=GRACE)
    assert REASON in found.run.stderr
    assert found.run.stderr.count("Traceback (most") == 1, found.run
    for rank in (1, 2):
        told = f"wfbp: PeerError: rank {rank} of 3: rank 0 failed: {REASON} (this rank was at "
        assert found.run.stderr.count(told) == 1, found.run


def test_an_exception_in_a_training_thread() -> None:
    found = ended(2, "fail", "thread", 1)
    assert REASON in found.run.stderr
    assert f"PeerError: rank 0 of 2: rank 1 failed: {REASON}" in found.run.stderr


def test_an_exception_in_a_thread_that_does_not_train() -> None:
    found = outcome("faults", 2, "fail", "beside", 1, timeout=100)
    assert REASON.partition(": ")[2] in found.run.stderr
    assert found.run.rc == 0, found.run


def test_an_exception_after_the_others_have_finished() -> None:
    assert REASON in ended(3, "fail", "finish", 1).run.stderr


def test_an_exception_on_every_rank() -> None:
    found = ended(3, "fail", "step", "all")
    assert [caught["kind"] for caught in found.ranks] == ["ValueError"] * 3


@pytest.mark.parametrize(("mpi", "who"), [("mpich", 0), ("openmpi", 1)])
def test_a_rank_that_leaves_while_others_step(mpi: str, who: int) -> None:
    found = ended(3, "leave", "step", who, mpi=mpi)
    for rank, caught in enumerate(found.ranks):
        if rank != who:
            assert caught["kind"] == "PeerError", found.run
            assert f"rank {who} has left" in caught["text"]
            assert "reducer, step 3: all-reduce of group 1 of 6 (t5)" in caught["text"]


@pytest.mark.parametrize("deed", ["fail", "leave"])
def test_a_rank_goes_while_parameters_travel(deed: str) -> None:
    found = ended(2, deed, "decoupled", 1, env=DECOUPLED)
    assert found.ranks[0]["kind"] == "PeerError", found.run
    told = f"rank 1 failed: {REASON}" if deed == "fail" else "rank 1 has left"
    assert told in found.ranks[0]["text"]
    assert (REASON in found.run.stderr) is (deed == "fail")


def test_a_rank_that_leaves_while_others_reduce() -> None:
    found = ended(2, "leave", "reduce", 0)
    assert "allreduce 'second'" in found.ranks[1]["text"]
    assert "rank 0 has left" in found.ranks[1]["text"]


def test_ranks_that_leave_at_the_end_end_well() -> None:
    found = outcome("faults", 2, "leave", "finish", "all", timeout=100)
    assert found.run.rc == 0, found.run
    assert found.ranks == [None, None]


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_killed_rank_ends_the_job(mpi: str) -> None:
    ended(3, "die", "step", 1, mpi=mpi)


@pytest.mark.parametrize(
    ("mpi", "who"), [("mpich", 0), pytest.param("openmpi", 1, marks=pytest.mark.long)]
)
def test_a_rank_that_stops_stepping(mpi: str, who: int) -> None:
    found = ended(3, "sleep", "step", who, mpi=mpi, env=GRACE)
    kinds = [caught["kind"] for rank, caught in enumerate(found.ranks) if rank != who]
    assert "StallError" in kinds, found.run
    assert set(kinds) <= {"StallError", "PeerError"}
    assert all(
        "step 3: all-reduce of group 1 of 6" in c["text"] for c in found.ranks if c is not None
    )
    assert f"rank {who}: reducer, step 3: nothing posted yet" in found.run.stderr


def test_a_method_waits_for_a_rank_without_gradients() -> None:
    text = ended(2, "sleep", "method", 0, env=GRACE).ranks[1]["text"]
    assert "rank 0: Own, step 0: nothing posted yet" in text
    assert "This rank called swap(), which averages its new gradients first" in text


@pytest.mark.parametrize("place", ["reduce", "wrap"])
def test_a_rank_that_stops_elsewhere(place: str) -> None:
    found = ended(2, "sleep", place, 0, env=GRACE)
    assert found.ranks[1]["kind"] == "StallError"
    assert {"reduce": "allreduce 'second'", "wrap": "reducer: comparing tensors"}[place] in (
        found.ranks[1]["text"]
    )
    assert "other ranks were here: rank 0: idle" in found.run.stderr


SETTINGS = {
    "WFBP_PROBE_BUDGET_S": ("1.5", "WFBP_PROBE_BUDGET_S (rank 0: 2.0; rank 1: 1.5)"),
    "WFBP_TRIAL_STEPS": ("9", "WFBP_TRIAL_STEPS (rank 0: 4; rank 1: 9)"),
    "WFBP_ZERO_COPY_MIN_BYTES": ("1K", "WFBP_ZERO_COPY_MIN_BYTES (rank 0: 256; rank 1: 1024)"),
    "WFBP_STALL_WARNING_S": ("9", ""),
}
"""What the last rank has, and what every rank is told of it; timeouts may differ."""


@pytest.mark.parametrize("variable", SETTINGS)
def test_settings_that_differ_are_named_on_every_rank(variable: str) -> None:
    values = [f"{name}={value}" for name, (value, _) in SETTINGS.items()]
    found = outcome("settings", 2, *values, timeout=100)
    assert found.run.rc == 0, found.run
    told = SETTINGS[variable][1]
    for results in found.ranks:
        text = results[variable]
        assert told in text if told else text is None, text

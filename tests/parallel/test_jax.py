"""JAX programs under mpirun: equal to one process, whatever they do; and never a hang."""

from __future__ import annotations

import re
from typing import Any

import psutil
import pytest

pytest.importorskip("jax")

from tests.parallel.programs.jax.program import check
from tests.parallel.runs import Job, Outcome, outcome
from tests.support import launcher

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

REPLANNED = (
    "recompilation",
    "many_steps_in_flight",
    "exchanges_in_any_order",
    "equal_exchanges_wherever_they_are",
    "scan_whose_gradient_does_not_change",
    "schedules",
    "optimizer_in_a_program",
)
"""Checks that also run while plans change, on three ranks; and in `make test-quick`."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.quick] * (n in REPLANNED)) for n in check.all]
)
@pytest.mark.parametrize("job", [Job("jax/program", 2, "overlap")], ids=str)
def test_program(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", REPLANNED)
@pytest.mark.parametrize("job", [Job("jax/program", 3, "changing")], ids=str)
def test_program_while_plans_change(job: Job, name: str) -> None:
    job.passes(name)


@pytest.mark.parametrize("name", REPLANNED[-2:])
@pytest.mark.parametrize("job", [Job("jax/program", 1, "overlap")], ids=str)
def test_on_one_rank(job: Job, name: str) -> None:
    job.passes(name)


def ended(case: str, **options: Any) -> Outcome:
    """The job ended by itself, long before its time limits (600 s), and not well."""
    found = outcome("jax/faults", 2, case, timeout=120, **options)
    assert found.run.rc not in (0, None), found.run
    return found


def test_an_exception_reaches_a_rank_that_waits_in_xla() -> None:
    found = ended("fail")
    assert found.ranks[0]["kind"] == "JaxRuntimeError"
    reason = "rank 0 of 2: rank 1 failed: ValueError: the data of this rank is broken"
    assert reason in found.ranks[0]["text"]


def test_a_rank_that_leaves_while_another_waits_in_xla() -> None:
    text = ended("leave").ranks[0]["text"]
    assert "rank 1 has left" in text
    assert "value_and_grad, step 3" in text


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_a_killed_rank_ends_the_job(mpi: str) -> None:
    """The launcher ends the others, which are still waiting in XLA."""
    found = ended("die", mpi=mpi)
    assert found.run.rc == launcher.KILLED[mpi], found.run
    assert [list(told) for told in found.ranks] == [["pid"]] * 2, "nobody caught anything"
    pids = [told["pid"] for told in found.ranks]
    left = [process for process in psutil.process_iter() if process.pid in pids]
    assert psutil.wait_procs(left, timeout=60)[1] == []


@pytest.mark.parametrize("mpi", ["mpich", pytest.param("openmpi", marks=pytest.mark.long)])
def test_a_rank_that_answers_no_more_ends_the_job(mpi: str) -> None:
    found = ended("stop", mpi=mpi, env=(("WFBP_ABORT_GRACE_S", "1"),))
    text = found.ranks[0]["text"]
    waited = r"StallError: rank 0 of 2 waited (\d+) s \(value_and_grad, step 3: all-reduce of"
    assert [int(seconds) >= 3 for seconds in re.findall(waited, text)] == [True], text
    assert "No answer came from rank 1: stopped, killed" in text


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("shapes", "p['b'] (rank 0: float32(3,); rank 1: float32(5,))"),
        ("schedules", "schedule (rank 0: single; rank 1: layerwise)"),
    ],
)
def test_ranks_that_disagree(case: str, said: str) -> None:
    for caught in ended(case).ranks:
        assert "DisagreementError" in caught["text"]
        assert said in caught["text"]


def test_two_steps_at_once_fail_on_every_rank() -> None:
    found = ended("two")
    texts = [caught["text"] for caught in found.ranks if caught is not None]
    assert any("two steps run at once" in t or "two steps end at once" in t for t in texts)
    for text in texts:
        assert "two steps" in text or "failed" in text


def test_a_step_on_several_devices_is_refused() -> None:
    found = ended("devices")
    texts = [caught["text"] for caught in found.ranks if caught is not None]
    assert any("several of this process's 2 devices" in text for text in texts)


@pytest.mark.parametrize("case", ["unawaited", "again"])
def test_a_program_that_ends_with_steps_under_way(case: str) -> None:
    found = outcome("jax/faults", 2, case, timeout=120)
    assert found.run.rc == 0, found.run
    assert "Error" not in found.run.stderr

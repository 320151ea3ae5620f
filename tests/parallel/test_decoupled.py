"""The border of decoupled training: around its steps, and at its end."""

from __future__ import annotations

import pytest

from tests.parallel.programs import torch_state
from tests.parallel.programs.decoupled_updates import check
from tests.parallel.programs.torch_reading_anywhere import KINDS
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]


@pytest.mark.parametrize("name", check.all)
def test_updates(name: str) -> None:
    """All in one run; ``mixed``: hybrids decouple every other tensor, whatever that costs."""
    found = outcome("decoupled_updates", 3, "mixed", timeout=180)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run


@pytest.mark.parametrize("end", ["shutdown", "exit"])
def test_ends(end: str) -> None:
    """Parameters are the final ones wherever they are read, and nobody complains."""
    found = outcome("decoupled_ends", 2, timeout=60)
    assert found.run.rc == 0, found.run
    assert not found.run.stderr
    for rank, wrong in enumerate(found.ranks):
        assert not wrong[end], f"rank {rank}: {wrong[end]}"
        assert "state" not in wrong, f"rank {rank}: {wrong['state']}"


@pytest.mark.parametrize("name", torch_state.check.all)
@pytest.mark.parametrize(
    ("ranks", "mode", "mpi"), [(3, "mixed", "mpich"), (2, "changing", "openmpi")]
)
def test_state(ranks: int, mode: str, mpi: str, name: str) -> None:
    """What one rank asks for alone, and what is broadcast in mid-training."""
    found = outcome("torch_state", ranks, mode, mpi=mpi, timeout=180)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run


@pytest.mark.parametrize(("schedule", "update"), KINDS)
def test_parameters_are_read_anywhere(schedule: str, update: str) -> None:
    """Right behind a step, from the program's own lists and by other threads."""
    found = outcome("torch_reading_anywhere", 2, timeout=150)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert not results[f"{schedule} {update}"], f"rank {rank}"
    assert found.run.rc == 0, found.run

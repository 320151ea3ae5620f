"""Decoupled training around its steps, and at its end."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch import state
from tests.parallel.runs import Job, outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]


ALL = Job("torch/program", 3, "mixed")
"""``mixed``: hybrids decouple every other tensor, whatever that costs."""
STATE = [
    ALL,
    pytest.param(Job("torch/program", 2, "changing", "openmpi"), marks=pytest.mark.long),
]


@pytest.mark.parametrize("end", ["shutdown", "exit"])
def test_ends(end: str) -> None:
    """Parameters are the final ones wherever they are read, and nobody complains."""
    found = outcome("torch/decoupled_ends", 2, timeout=150)
    assert found.run.rc == 0, found.run
    assert not found.run.stderr
    for rank, wrong in enumerate(found.ranks):
        assert not wrong[end], f"rank {rank}: {wrong[end]}"
        assert "state" not in wrong, f"rank {rank}: {wrong['state']}"


@pytest.mark.parametrize("name", state.check.all)
@pytest.mark.parametrize("job", STATE, ids=str)
def test_state(job: Job, name: str) -> None:
    """State that one rank reads alone, and state that is broadcast during training."""
    job.passes(name)

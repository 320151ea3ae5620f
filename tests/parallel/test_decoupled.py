"""The border of decoupled training: around its steps, and at its end."""

from __future__ import annotations

import pytest

from tests.parallel.programs.decoupled_updates import check
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

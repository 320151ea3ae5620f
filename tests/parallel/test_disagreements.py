"""Ranks that do not do the same all get an error that names who, which tensor and what."""

from __future__ import annotations

import pytest

from tests.parallel.programs import disagreements
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", disagreements.check.all)
@pytest.mark.parametrize("ranks", [2, 3])
def test_disagreement(ranks: int, name: str) -> None:
    found = outcome("disagreements", ranks, "overlap", timeout=110)
    for rank, results in enumerate(found.ranks):
        assert results is not None, found.run
        assert not results[name], f"rank {rank}: {results[name]}"
    assert found.run.rc == 0, found.run

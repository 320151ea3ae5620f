"""Training with gradients on a device made of threads equals one process, in every schedule."""

from __future__ import annotations

import pytest

from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(240)]

SCHEDULES = {
    # Whole gradients, shards, both, and plans that change.
    "NCCL": ("auto", "layerwise", "hybrid", "ps_layerwise"),
    # Only what carries messages is another.
    "STAGED": ("auto", "hybrid"),
}
"""By library."""
RUNS = [f"{library}/{schedule}" for library, names in SCHEDULES.items() for schedule in names]


@pytest.mark.parametrize("run", RUNS)
def test_equals_one_process(run: str) -> None:
    found = outcome("torch/device", 2, *RUNS, timeout=220)
    assert found.run.rc == 0, found.run
    for rows in found.ranks:
        row = rows[run]
        limit = 1e-5 if row["dtype"] == "float32" else 1e-13
        assert row["after_twenty"] <= limit, row
        assert row["at_the_end"] <= limit, row
        assert row["ranks_equal"], row
        assert row["moved"] > 0.01, row
        assert not row["unused_has_gradient"], row

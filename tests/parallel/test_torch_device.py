"""Training with gradients on a device made of threads equals one process, in every schedule."""

from __future__ import annotations

import pytest

from tests.parallel.programs.torch.device import OPTIMIZERS
from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(100)]

SCHEDULES = ("auto", "wfbp", "single", "independent", "hybrid", "ps_layerwise", "replicated")


@pytest.mark.parametrize("library", ["NCCL", "STAGED"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equals_one_process(schedule: str, library: str) -> None:
    found = outcome("torch/device", 2, ",".join(SCHEDULES), library, timeout=90)
    assert found.run.rc == 0, found.run
    for rows in found.ranks:
        mine = [row for row in rows if row["schedule"] == schedule]
        assert len(mine) == len(OPTIMIZERS)
        for row in mine:
            limit = 1e-5 if row["dtype"] == "float32" else 1e-13
            assert row["after_twenty"] <= limit, row
            assert row["at_the_end"] <= limit, row
            assert row["ranks_equal"], row
            assert row["moved"] > 0.01, row
            assert not row["unused_has_gradient"], row

"""N ranks train as one process does on the concatenated batch, by every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.programs.torch import equality, further_optimizers
from tests.parallel.runs import outcome
from wfbp.core.types import ALL_REDUCE_SCHEDULES as ALL_REDUCE

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(200)]

MAY_ALL_REDUCE = (*ALL_REDUCE, "auto", "hybrid")
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}


def records(ranks: int, mpi: str, schedules: str) -> list[Any]:
    found = outcome("torch/equality", ranks, schedules, mpi=mpi, timeout=180)
    assert found.run.rc == 0, found.run
    assert None not in found.ranks, found.run
    return found.ranks


def check(ranks: int, mpi: str, schedules: str, schedule: str, optimizer: str) -> None:
    for rank, rows in enumerate(records(ranks, mpi, schedules)):
        mine = [r for r in rows if (r["schedule"], r["optimizer"]) == (schedule, optimizer)]
        assert len(mine) == len(equality.DTYPES[optimizer])
        for row in mine:
            assert row["after_twenty"] <= TOLERANCE[row["dtype"]], (rank, row)
            assert row["at_the_end"] <= TOLERANCE[row["dtype"]], (rank, row)
            assert row["ranks_equal"], (rank, row)
            assert row["moved"] > 0.01, (rank, row)
            assert not row["unused_has_gradient"], (rank, row)
            assert not row["unused_moved"], (rank, row)
            assert not row["frozen_moved"], (rank, row)
            if ranks > 1:
                phases = [p for p in ("profile", "trial", "installed") if p in row["phases"]]
                if schedule not in MAY_ALL_REDUCE:
                    assert row["decoupled"], (rank, row)
                tried = schedule in ("auto", "dear")
                wanted = ["profile", "trial", "installed"]
                assert phases == (wanted if tried else ["profile", "installed"]), row


SCHEDULES = {
    # Alone nothing is planned, and nothing sent: one of each kind of update.
    1: ("auto", "ps_layerwise", "replicated"),
    2: tuple(equality.SCHEDULES),
    3: tuple(equality.SCHEDULES),
    # Planners do not know the number of ranks. What four ranks could do otherwise than two or
    # three is to cut and to send: whole groups, single tensors, and both in one plan.
    4: ("auto", "wfbp", "hybrid", "ps_layerwise", "replicated"),
}
"""By number of ranks."""


@pytest.mark.parametrize("optimizer", equality.OPTIMIZERS)
@pytest.mark.parametrize(
    ("ranks", "schedule"), [(ranks, name) for ranks, names in SCHEDULES.items() for name in names]
)
def test_equals_one_process(ranks: int, schedule: str, optimizer: str) -> None:
    check(ranks, "mpich", ",".join(SCHEDULES[ranks]), schedule, optimizer)


@pytest.mark.parametrize("schedule", ["auto", "wfbp"])
def test_equals_one_process_under_open_mpi(schedule: str) -> None:
    check(2, "openmpi", "auto,wfbp", schedule, "adamw")


@pytest.mark.parametrize("optimizer", further_optimizers.ALL)
def test_further_optimizers_equal_one_process(optimizer: str) -> None:
    """Under a schedule that decouples every tensor; what can be shared out is."""
    names = ",".join(further_optimizers.ALL)
    found = outcome("torch/equality", 3, "dear", names, timeout=180)
    assert found.run.rc == 0, found.run
    for rank, rows in enumerate(found.ranks):
        (row,) = [r for r in rows if r["optimizer"] == optimizer]
        assert row["after_twenty"] <= TOLERANCE["float64"], (rank, row)
        assert row["at_the_end"] <= TOLERANCE["float64"], (rank, row)
        assert row["ranks_equal"], (rank, row)
        assert row["moved"] > 0.01, (rank, row)
        assert row["plan"] == "dear", (rank, row)
        assert {"trial", "installed"} <= set(row["phases"]), (rank, row)
        assert row["decoupled"], (rank, row)
        assert row["shares_state"] == (optimizer in further_optimizers.ELEMENTWISE), (rank, row)


def test_every_optimizer_of_pytorch_is_compared() -> None:
    found = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    made = further_optimizers.made(equality.param_groups)
    compared = {type(make(equality.Model())).__name__ for make in made.values()}
    assert found - compared - further_optimizers.COUPLED == {"Optimizer"}


def test_the_small_threshold_makes_several_groups() -> None:
    rows = records(2, "mpich", ",".join(equality.SCHEDULES))[0]
    groups = {r["schedule"]: r["num_groups"] for r in rows if r["dtype"] == "float32"}
    assert groups["single"] == 1
    assert groups["single"] < groups["threshold"] < groups["wfbp"]

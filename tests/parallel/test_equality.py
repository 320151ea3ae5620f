"""N ranks train as one process does on the concatenated batch, by every schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.programs.torch import equality
from tests.parallel.runs import JOB_S, outcome
from wfbp.core.planners import ALL_REDUCE_SCHEDULES as ALL_REDUCE

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(840)]

MAY_ALL_REDUCE = (*ALL_REDUCE, "auto", "hybrid")
DECOUPLED = [schedule for schedule in equality.SCHEDULES if schedule not in ALL_REDUCE]
"""Those that decouple, or may."""
TOLERANCE = {"float32": 1e-5, "float64": 1e-13}
"""Of 20 steps."""
END = {"float32": 1e-4, "float64": 1e-9}
"""Of as many steps as a trial needs, up to 120: rounding errors grow from step to step. A wrong
update is far beyond it."""


RUNS = {
    # Alone nothing is planned, and nothing sent: one of each kind of update.
    1: [(schedule, "adamw") for schedule in ("auto", "ps_layerwise")],
    2: [("single", "momentum"), ("threshold", "momentum"), ("layerwise", "momentum"),
        ("auto", "adamw"), ("ps_layerwise", "nesterov")],
    3: [(schedule, equality.DOUBLE) for schedule in (*ALL_REDUCE, *DECOUPLED)],
}  # fmt: skip
"""Schedules and optimizers that are compared, by number of ranks."""
LONG = {
    # With whole gradients, optimizers step as without wfbp: each element type once.
    2: [
        *((schedule, "momentum") for schedule in (*ALL_REDUCE, *DECOUPLED)),
        *((schedule, "adamw") for schedule in DECOUPLED),
        *((schedule, "nesterov") for schedule in ("auto", "layerwise")),
    ],
    # Planners do not know the number of ranks. Five ranks cut and send otherwise than two or
    # three.
    5: [
        *((schedule, "momentum") for schedule in DECOUPLED),
        *((schedule, equality.DOUBLE) for schedule in ("layerwise",)),
    ],
}
"""Further ones, in ``make test-long``."""
UNDER_OPEN_MPI = [("auto", "adamw"), ("layerwise", "adamw")]


def records(ranks: int, mpi: str = "mpich") -> list[Any]:
    return trained(ranks, RUNS[ranks] if mpi == "mpich" else UNDER_OPEN_MPI, mpi)


def trained(ranks: int, runs: list[tuple[str, str]], mpi: str = "mpich") -> list[Any]:
    found = outcome("torch/equality", ranks, *map("/".join, runs), mpi=mpi, timeout=JOB_S)
    assert found.run.rc == 0, found.run
    assert None not in found.ranks, found.run
    return found.ranks


def check(schedule: str, optimizer: str, ranks: list[Any]) -> None:
    for rank, rows in enumerate(ranks):
        (row,) = [r for r in rows if (r["schedule"], r["optimizer"]) == (schedule, optimizer)]
        assert row["after_twenty"] <= TOLERANCE[row["dtype"]], (rank, row)
        assert row["at_the_end"] <= END[row["dtype"]], (rank, row)
        assert row["ranks_equal"], (rank, row)
        assert row["moved"] > 0.01, (rank, row)
        assert not row["unused_has_gradient"], (rank, row)
        assert not row["unused_moved"], (rank, row)
        assert not row["frozen_moved"], (rank, row)
        if len(ranks) > 1:
            phases = [p for p in ("profile", "trial", "installed") if p in row["phases"]]
            if schedule not in MAY_ALL_REDUCE:
                assert row["decoupled"], (rank, row)
            tried = schedule in ("auto", "dear")
            wanted = ["profile", "trial", "installed"]
            assert phases == (wanted if tried else ["profile", "installed"]), row


@pytest.mark.parametrize(
    ("ranks", "schedule", "optimizer"),
    [(ranks, *run) for ranks, runs in RUNS.items() for run in runs],
)
def test_equals_one_process(ranks: int, schedule: str, optimizer: str) -> None:
    check(schedule, optimizer, records(ranks))


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "schedule", "optimizer"),
    [(ranks, *run) for ranks, runs in LONG.items() for run in runs],
)
def test_further_combinations_equal_one_process(ranks: int, schedule: str, optimizer: str) -> None:
    check(schedule, optimizer, trained(ranks, LONG[ranks]))


@pytest.mark.parametrize(("schedule", "optimizer"), UNDER_OPEN_MPI)
def test_equals_one_process_under_open_mpi(schedule: str, optimizer: str) -> None:
    check(schedule, optimizer, records(2, "openmpi"))


@pytest.mark.parametrize("ranks", [2])
def test_the_small_threshold_makes_several_groups(ranks: int) -> None:
    rows = records(ranks)[0]
    groups = {r["schedule"]: r["num_groups"] for r in rows if r["dtype"] == "float32"}
    assert groups["single"] == 1
    assert groups["single"] < groups["threshold"] < groups["layerwise"]

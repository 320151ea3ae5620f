"""``python -m tests.benchmarks memory`` on two ranks."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.support import launcher

pytest.importorskip("torch")
pytest.importorskip("rich")

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(240)]

SMALL = ("--width", 64, "--layers", 2, "--steps", 1)
QUICK = {"WFBP_WARMUP_STEPS": "1", "WFBP_PROFILE_STEPS": "1", "WFBP_PROBE_BUDGET_S": "0.02"}

ONE_AFTER_ANOTHER = """
import sys
from tests.benchmarks.__main__ import main
options = sys.argv[1:]
for update in ("sharded", "baseline"):
    sys.argv[1:] = ["memory", "--update", update, "--json", *options]
    assert main() == 0
"""


def test_sharded_updates_hold_a_part_of_the_state(mpirun: Callable[..., launcher.Run]) -> None:
    run = mpirun(2, "-c", ONE_AFTER_ANOTHER, *SMALL, env=QUICK, timeout=110, preloaded="torch")
    assert run.rc == 0, run
    rows = {row["update"]: row for row in map(json.loads, run.stdout.splitlines())}
    elements = 2 * (64 * 64 + 64) + 64 + 1
    for row in rows.values():
        assert row["ranks"] == 2
        assert row["parameter_bytes"] == 4 * elements
        assert row["peak_bytes"] > row["state_bytes"] > 0
    # Two numbers per element, and a count of steps per tensor; shards are rounded up to 16 bytes.
    whole = 2 * 4 * elements
    assert whole < rows["baseline"]["state_bytes"] < whole * 1.01
    assert whole / 2 < rows["sharded"]["state_bytes"] < whole / 2 * 1.02


@pytest.mark.long
def test_sharded_training_never_holds_what_other_ranks_update(
    mpirun: Callable[..., launcher.Run],
) -> None:
    """Neither state that is whole at first, nor buffers of plans that are over.

    A sharded update saves half of Adam's state, half of what its step computes with, and memory of
    whole averages. The factors are measured; a leak would take one away. Memory is returned as soon
    as it is free, so that its neighbours do not matter. Tensors are small, because threads free the
    last few of them at different times.
    """
    exact = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }
    rows = {}
    for update in ("sharded", "baseline"):
        options = ("--update", update, "--width", 512, "--layers", 32, "--steps", 2, "--json")
        run = mpirun(
            2, "-m", "tests.benchmarks", "memory", *options, env=QUICK | exact, timeout=110
        )
        assert run.rc == 0, run
        rows[update] = json.loads(run.stdout)
    parameter_bytes = rows["sharded"]["parameter_bytes"]
    assert parameter_bytes > 32 << 20
    for moment, factor in (("peak_bytes", 2.4), ("end_bytes", 1.35)):
        saved = (rows["baseline"][moment] - rows["sharded"][moment]) / parameter_bytes
        assert saved == pytest.approx(factor, abs=0.12), (moment, rows)

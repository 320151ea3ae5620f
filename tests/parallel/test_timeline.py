"""Timelines of a job of which a rank is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.launcher import mpirun
from wfbp.cli.app import wfbp as command
from wfbp.runtime.timeline import load

pytestmark = pytest.mark.parallel

PROGRAM = """
import os
import signal
import time
import numpy as np
import wfbp
wfbp.init()
reducer = wfbp.GradientReducer([("w", np.zeros(1000, np.float32))])
for step in range(40):
    reducer.mark_ready(0, np.ones(1000, np.float32))
    reducer.wait()
    time.sleep(0.03)
if wfbp.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def test_every_rank_leaves_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "timelines"
    run = mpirun(
        2, "-c", PROGRAM, env={"WFBP_TIMELINE": str(folder), "WFBP_TIMELINE_STEPS": "5-25"}
    )
    assert run.rc not in (0, None), run
    for rank in range(2):
        events = load(folder / f"timeline.rank{rank}.json")["traceEvents"]
        json.loads((folder / f"timeline.rank{rank}.json").read_text())
        steps = {e["args"]["step"] for e in events if "step" in e.get("args", {})}
        assert steps == set(range(5, 26))
    told = CliRunner().invoke(command, ["timeline", str(folder), "--json"])
    assert told.exit_code == 0, told.output
    rows = json.loads(told.output)["ranks"]
    assert [(row["rank"], row["steps"]) for row in rows] == [(0, 21), (1, 21)]
    merged = load(folder / "timeline.json")["traceEvents"]
    assert {e["pid"] for e in merged} == {0, 1}
    table = CliRunner().invoke(command, ["timeline", str(folder)])
    assert table.exit_code == 0
    assert "exposed" in table.output


def test_a_folder_without_timelines(tmp_path: Path) -> None:
    told = CliRunner().invoke(command, ["timeline", str(tmp_path)])
    assert isinstance(told.exception, ValueError)
    assert "no timelines" in str(told.exception)

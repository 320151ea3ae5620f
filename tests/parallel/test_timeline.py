"""Timelines of a job of which a rank is killed, beside what the job's statistics say."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.launcher import mpirun
from tests.support.trace_events import check
from wfbp.cli.run_files import load_runs
from wfbp.cli.timeline import command
from wfbp.runtime.timeline_files import load, summarize

pytestmark = pytest.mark.parallel

PROGRAM = """
import json
import os
import signal
import time
from pathlib import Path
import numpy as np
import wfbp
wfbp.init()
names = ("a", "b")
specs = [(n, np.zeros(500_000, np.float32)) for n in names]
reducer = wfbp.GradientReducer(specs, schedule="layerwise")
other = wfbp.GradientReducer([(n, np.zeros(3, np.float32)) for n in "cdefg"], name="other")
gradients = [np.ones(500_000, np.float32) for _ in names]
for step in range(45):
    for index in (1, 0):
        time.sleep(0.01)
        reducer.mark_ready(index, gradients[index])
    reducer.wait()
    for index in range(5):
        other.mark_ready(index, np.ones(3, np.float32))
    other.wait()
    if step == 39:
        line = json.dumps({"rank": wfbp.rank(), **reducer.report()})
        print(f"{line}\\n", end="", flush=True)  # in one write: other ranks print, too
if wfbp.rank() == 1:
    first, last = map(int, os.environ["WFBP_RECORD_STEPS"].split("-"))
    for rank in range(wfbp.size()):  # which write some times a second; each step has one wait
        file = Path(os.environ["WFBP_RECORD"], f"timeline.rank{rank}.json")
        while file.read_text().count('"wait for gradients"') < 2 * (last - first + 1):
            time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


RANKS = 3
STEPS = range(5, 40)
WINDOW = 20
"""Steps of which statistics are."""
SETTINGS = {"WFBP_WARMUP_STEPS": "2", "WFBP_PROFILE_STEPS": "3", "WFBP_REPLAN_THRESHOLD": "0"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder with timelines, and what the job printed."""
    folder = tmp_path_factory.mktemp("job") / "timelines"
    steps = f"{STEPS[0]}-{STEPS[-1]}"
    settings = {**SETTINGS, "WFBP_RECORD": str(folder), "WFBP_RECORD_STEPS": steps}
    run = mpirun(RANKS, "-c", PROGRAM, env=settings)
    assert run.rc not in (0, None), run
    return folder, run.stdout


def since(first: int, document: dict[str, Any]) -> dict[str, Any]:
    """What happened in later steps."""
    events = document["traceEvents"]
    kept = [e for e in events if e["ph"] == "M" or e["args"]["step"] >= first]
    return {**document, "traceEvents": kept}


def test_the_timeline_and_the_statistics_agree(job: tuple[Path, str]) -> None:
    """What is exposed, and so what overlaps, is the same in both."""
    folder, printed = job
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert sorted(report["rank"] for report in lines) == list(range(RANKS))
    for report in lines:
        assert report["steps"] == STEPS[-1] + 1
        document = load(folder / f"timeline.rank{report['rank']}.json")
        events = document["traceEvents"]
        first = STEPS[-1] - WINDOW + 1
        of_other, row = summarize(since(first, document))
        assert (of_other["optimizer"], row["optimizer"]) == ("other", "reducer")
        assert row["exposed_s"] == pytest.approx(report["exposed_s"], rel=0.05)
        # An iteration begins where the step before it ends.
        iteration_s = summarize(since(first - 1, document))[1]["iteration_s"]
        assert iteration_s == pytest.approx(report["measured_iteration_s"], rel=0.05)
        waits = [e for e in events if e["name"] == "wait for gradients" and e["tid"] == 1]
        waits_s = [e["dur"] * 1e-6 for e in waits][-WINDOW:]
        assert statistics.median(waits_s) == pytest.approx(report["exposed_s"], rel=0.05)
        overlap = 1 - row["exposed_s"] / iteration_s
        assert overlap == pytest.approx(
            1 - report["exposed_s"] / report["measured_iteration_s"], rel=0.05
        )


def test_every_rank_leaves_its_file(job: tuple[Path, str]) -> None:
    folder, _ = job
    runs = load_runs(str(folder))  # the same directory has what `wfbp report` reads
    assert ("reducer", RANKS, []) in [(run.name, run.size, run.missing) for run in runs]
    for rank in range(RANKS):
        events = load(folder / f"timeline.rank{rank}.json")["traceEvents"]
        check(load(folder / f"timeline.rank{rank}.json"))
        steps = {e["args"]["step"] for e in events if "step" in e.get("args", {})}
        assert steps == set(STEPS)
    told = CliRunner().invoke(command, [str(folder), "--json"])
    assert told.exit_code == 0, told.output
    rows = json.loads(told.output)["ranks"]
    assert [(row["rank"], row["optimizer"]) for row in rows] == [
        (rank, name) for rank in range(RANKS) for name in ("other", "reducer")
    ]
    installed = 2 + 4  # after the warm-up, and a cold step and three of the profile
    for row in rows[1::2]:  # its plan is always the same; that of the other one may be in a trial
        assert (row["first_step"], row["last_step"]) == (installed, STEPS[-1])
        assert row["steps"] == STEPS[-1] - installed + 1
    merged = load(folder / "timeline.json")
    check(merged)
    assert {e["pid"] for e in merged["traceEvents"]} == set(range(RANKS))
    table = CliRunner().invoke(command, [str(folder)])
    assert table.exit_code == 0
    assert "exposed" in table.output


def test_a_folder_without_timelines(tmp_path: Path) -> None:
    told = CliRunner().invoke(command, [str(tmp_path)])
    assert isinstance(told.exception, ValueError)
    assert "no timelines" in str(told.exception)

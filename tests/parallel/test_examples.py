"""The examples run, learn, and learn the same by every schedule."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.parallel.runs import outcome
from tests.support import launcher

pytest.importorskip("torch")
pytest.importorskip("sklearn")

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.timeout(520)]

SCHEDULES = {2: ("auto", "layerwise"), 4: ("hybrid",)}
"""By number of ranks; test_equality.py has all."""
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOLERANCE = 0.006
"""Two of the 360 test images: what torch_digits.py states."""
GPT = "torch_gpt.py --steps 90 --width 64 --depth 2 --max-bytes 300000"
GPT_ALONE = "torch_gpt.py --steps 2 --width 32 --depth 1 --max-bytes 300000"


def digits(schedule: str) -> str:
    return f"torch_digits.py --epochs 5 --schedule {schedule}"


RUNS = {
    1: (GPT_ALONE,),
    2: (*map(digits, SCHEDULES[2]), GPT),
    4: (*map(digits, SCHEDULES[4]),),
}
"""What runs in one job, by number of ranks."""
SOON = (("WFBP_TRIAL_STEPS", "1"),)
"""Plans are chosen within the steps that there are, however slow the machine is."""


def told(ranks: int, run: str) -> str:
    """What the first rank of an example printed."""
    found = outcome("examples", ranks, *RUNS[ranks], timeout=250, env=SOON, preloaded="torch")
    assert found.run.rc == 0, found.run
    printed: str = found.ranks[0][run]
    return printed


def accuracies(output: str) -> list[float]:
    return [float(a) / 100 for a in re.findall(r"test accuracy ([\d.]+)%", output)]


@pytest.mark.parametrize(
    ("size", "schedule"),
    [
        pytest.param(size, name, marks=[pytest.mark.long] * (size > 2))
        for size, names in SCHEDULES.items()
        for name in names
    ],
)
def test_digits(size: int, schedule: str) -> None:
    """At four ranks the same global batches are split otherwise."""
    final = accuracies(told(size, digits(schedule)))[-1]
    assert final >= 0.97
    for other in SCHEDULES[2]:
        assert abs(final - accuracies(told(2, digits(other)))[-1]) <= TOLERANCE, other


@pytest.mark.parametrize("ranks", [1, 2])
def test_numpy_mlp(ranks: int) -> None:
    """Started as users start it."""
    done = launcher.mpirun(ranks, "examples/numpy_mlp.py", timeout=110)
    assert done.rc == 0, done
    assert accuracies(done.stdout)[-1] >= 0.95


def test_gpt_learns_and_reports_its_plan() -> None:
    output = told(2, GPT)
    losses = re.search(r"loss\s*│ ([\d.]+) -> ([\d.]+)", output)
    assert losses is not None, output
    assert float(losses[2]) < float(losses[1]) - 1
    assert re.search(r"plan\s*│ \w+: \d+ groups? ", output), output
    assert re.search(r"iteration, measured\s*│ [\d.]+ ms", output), output


def test_gpt_runs_alone() -> None:
    assert "nothing to exchange" in told(1, GPT_ALONE)


@pytest.mark.long  # CI runs `make demo` itself (.ci/newcomer)
def test_the_demo_shows_ddp_and_wfbp_side_by_side(tmp_path: Path) -> None:
    """In shared memory, which needs no rights."""
    program = [sys.executable, EXAMPLES / "overlap.py", "--no-link", "--steps", "12"]
    done = subprocess.run(
        [*map(str, program), "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for name in ("DDP", "wfbp"):
        assert f"{name}: one step of rank 0" in done.stdout
    page = (tmp_path / "demo" / "demo.html").read_text()
    drawn = re.findall(r'<rect[^>]* fill="(#\w+)"', page)
    compute, update, message = "#4c78a8", "#1d3557", "#f2a541"
    # Each contestant has all of them, whatever plan it has: forward and backward, an update, and
    # messages.
    assert all(drawn.count(kind) >= 2 for kind in (compute, update, message)), drawn
    assert (tmp_path / "demo" / "report.html").exists()
    losses = re.findall(r"([\d.]+) -> ([\d.]+)", done.stdout)
    assert len(losses) == 2
    assert all(float(last) < float(first) for first, last in losses)
    for ours, theirs in zip(*losses, strict=True):  # who averages changes nothing but rounding
        assert abs(float(ours) - float(theirs)) < 0.02
    assert "waiting" in done.stdout
    assert done.stdout.count("█") > 50


@launcher.needs_namespaces
def test_the_demo_can_be_interrupted(tmp_path: Path) -> None:
    """As by Ctrl-C in a terminal: its network is removed, and it ends without a traceback."""

    def exists(network: str) -> bool:
        listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
        return f"{network}-a" in listed.stdout

    def trains(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return any("libtorch" in memory.path for memory in process.memory_maps())
        return False

    # Shells start background jobs with SIGINT ignored, and children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    demo = subprocess.Popen(
        [sys.executable, EXAMPLES / "overlap.py", "--output", tmp_path],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    signal.signal(signal.SIGINT, before)
    try:
        network = ""
        while not exists(network or "wfbp none"):
            assert demo.poll() is None
            time.sleep(0.1)
            children = psutil.Process(demo.pid).children()
            network = f"wfbp{children[0].pid}" if children else ""
        while sum(map(trains, psutil.Process(demo.pid).children(recursive=True))) < 2:
            assert demo.poll() is None
            time.sleep(0.1)
        os.killpg(demo.pid, signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert not exists(network)
    assert demo.returncode == 130, errors
    assert "link.py: stopped by SIGINT" in errors
    assert 'overlap.py", line' not in errors

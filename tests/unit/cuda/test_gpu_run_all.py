"""All that a GPU is wanted for, as far as it goes without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu import run_all
from tests.gpu.run_all import Outcome, Part


def python(name: str, code: str, **details: object) -> Part:
    words = (sys.executable, "-c", code)
    return Part(name, 20.0, words, words, **details)  # type: ignore[arg-type]


def outcome_of(part: Part, out: Path, limit_s: float = 20.0) -> Outcome:
    return run_all.run(part, limit_s, out, dry_run=False)


@pytest.mark.parametrize(
    ("code", "all_run", "verdict"),
    [
        ("print('3 passed in 1.0s')", True, "passed"),
        ("print('3 passed, 1 skipped in 1.0s')", False, "passed"),
        ("print('3 passed, 1 skipped in 1.0s')", True, "failed"),
        ("print('no'); raise SystemExit(3)", False, "failed"),
    ],
)
def test_verdicts(code: str, all_run: bool, verdict: str, tmp_path: Path) -> None:
    found = outcome_of(python("part", code, all_run=all_run), tmp_path)
    assert found.verdict == verdict
    assert Path(found.log).read_text().splitlines()[-1] == found.told != ""


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    """What it has printed until then is kept."""
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    found = outcome_of(python("part", code), tmp_path, limit_s=2.0)
    assert found.verdict == "timed out"
    assert found.seconds < 20
    name, pid = found.told.split()
    assert name == "child"
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(int(pid), 9)
        pytest.fail("the child is still there")


def test_what_needs_a_program_that_is_not_here_is_left_out(tmp_path: Path) -> None:
    found = outcome_of(python("part", "", needs="no-such-program"), tmp_path)
    assert (found.verdict, found.told) == ("left out", "no-such-program is not installed")


def test_a_run_goes_on_where_another_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = [python("one", "print('fine')"), python("two", "raise SystemExit(1)")]
    monkeypatch.setattr(run_all, "parts", lambda out, wheels: fails)
    assert run_all.main(["--out", str(tmp_path)]) == 1
    works = [python("one", "raise SystemExit(1)"), python("two", "print('now')")]
    monkeypatch.setattr(run_all, "parts", lambda out, wheels: works)
    assert run_all.main(["--out", str(tmp_path)]) == 0
    assert "one: has passed before" in capsys.readouterr().out
    assert run_all.main(["--out", str(tmp_path), "--budget-minutes", "0"]) == 0
    (tmp_path / "summary.json").unlink()
    assert run_all.main(["--out", str(tmp_path), "--budget-minutes", "0"]) == 1
    told = json.loads((tmp_path / "summary.json").read_text())
    assert {(each["verdict"], each["told"]) for each in told} == {
        ("left out", "the time budget is spent")
    }


def test_the_first_answers_come_first() -> None:
    names = [part.name for part in run_all.parts(Path("out"), Path("wheels"))]
    expected = ["install", "hello", "single", "two_ranks", "pack", "sanitizer", "overhead", "ddp"]
    assert names == expected
    known = {part.name: part for part in run_all.parts(Path("out"), None)}
    assert dict(known["two_ranks"].env) == {"NCCL_DEBUG": "INFO"}
    assert known["two_ranks"].all_run


@pytest.mark.parallel
@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Two ranks start, and the tests that a GPU is wanted for are found."""
    chosen = ["install", "hello", "single", "two_ranks"]
    command = [sys.executable, str(Path(run_all.__file__)), "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--wheels", str(tmp_path), "--parts", *chosen],
        capture_output=True,
        text=True,
        timeout=110,
    )
    told = {each["name"]: each for each in json.loads((tmp_path / "summary.json").read_text())}
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in chosen}
    assert done.returncode == 0, (done.stdout, done.stderr, logs)
    assert list(told) == chosen
    assert "rank 0 of 2: " in logs["hello"]
    assert "rank 1 of 2: " in logs["hello"]
    assert "the sum of ranks is 3.0" in logs["hello"]
    assert "test_two_ranks_train_as_one[NCCL]" in logs["two_ranks"]
    assert "test_two_ranks" not in logs["single"]
    assert "test_streams_events_and_copies" in logs["single"]
    assert "mpi4py" in logs["install"]

"""All that a GPU is wanted for, as far as it goes without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks import gpu
from tests.gpu import run_all
from tests.gpu.run_all import Outcome, Part


def python(name: str, code: str, least_s: float = 0.1, **details: object) -> Part:
    words = (sys.executable, "-c", code)
    return Part(name, "does it", 20.0, least_s, words, words, **details)  # type: ignore[arg-type]


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
    """Also children in other sessions, like the ranks of tests; their output is kept."""
    code = (
        "import subprocess, sys\n"
        "sleep = 'import time; time.sleep(100)'\n"
        "command = [sys.executable, '-c', sleep]\n"
        "children = [subprocess.Popen(command, start_new_session=apart) for apart in (0, 1)]\n"
        "print('children', *(child.pid for child in children), flush=True)\n"
        "children[0].wait()\n"
    )
    found = outcome_of(python("part", code), tmp_path, limit_s=5.0)
    assert found.verdict == "timed out"
    assert found.seconds < 60
    name, *pids = found.told.split()
    assert name == "children"
    assert len(pids) == 2
    for pid in pids:
        for _ in range(1000):
            stat = Path(f"/proc/{pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.05)
        else:
            os.kill(int(pid), 9)
            pytest.fail("a child is still there")


def test_what_cannot_be_started_has_failed(tmp_path: Path) -> None:
    """As two ranks where mpirun is not there; the next part is run."""
    words = (str(tmp_path / "mpirun"), "-n", "2")
    found = outcome_of(Part("hello", "does it", 20.0, 1.0, words, words), tmp_path)
    assert found.verdict == "failed"
    assert "mpirun" in found.told
    assert "No such file" in Path(found.log).read_text()


def test_what_needs_a_program_that_is_not_here_is_left_out(tmp_path: Path) -> None:
    found = outcome_of(python("part", "", needs="no-such-program"), tmp_path)
    assert (found.verdict, found.told) == ("left out", "no-such-program is not installed")


def test_a_run_goes_on_where_another_has_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has passed is not run again, and what was not tried comes before what has failed."""

    def verdicts() -> list[tuple[str, str]]:
        told = json.loads((tmp_path / "summary.json").read_text())
        return [(each["name"], each["verdict"]) for each in told]

    stops = [python("one", "print('fine')"), python("two", "raise SystemExit(1)")]
    stops.append(python("three", "print('three')", least_s=19.0))
    monkeypatch.setattr(run_all, "parts", lambda out, wheels: stops)
    short = ["--out", str(tmp_path), "--budget-minutes", "0.3"]
    assert run_all.main(short) == 1
    assert verdicts() == [("one", "passed"), ("two", "failed"), ("three", "left out")]
    assert "too little of the time budget is left: run it again" in capsys.readouterr().out
    works = [python("one", "raise SystemExit(1)"), python("two", "print('now')"), stops[2]]
    monkeypatch.setattr(run_all, "parts", lambda out, wheels: works)
    assert run_all.main(["--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.index("three: passed") < told.index("two: passed")
    assert verdicts() == [(name, "passed") for name in ("one", "two", "three")]
    assert run_all.main(["--out", str(tmp_path), "--budget-minutes", "0"]) == 0


def test_the_first_answers_come_first() -> None:
    names = [part.name for part in run_all.parts(Path("out"), Path("wheels"))]
    first = ["install", "hello", "single", "two_ranks", "two_ranks_jax", "pack", "sanitizer"]
    rest = ["overhead_resnet50", "overhead_gpt", "ddp_gpt", "ddp_resnet50", "schedules"]
    assert names == first + rest
    known = {part.name: part for part in run_all.parts(Path("out"), None)}
    for name in ("two_ranks", "two_ranks_jax"):
        env = dict(known[name].env)
        assert env == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "out/nccl.%h.%p.log"}
        assert known[name].all_run
    assert all(part.least_s < part.limit_s < 600 for part in known.values())


@pytest.mark.parametrize("part", run_all.parts(Path("out"), None), ids=lambda part: part.name)
def test_what_is_run_is_there(part: Part) -> None:
    """Options that are known, and files that exist."""
    for words in (part.command, part.rehearsal):
        if "tests.benchmarks" in words:
            options = gpu.arguments(words[words.index("gpu") + 1 :])
            assert options.rehearse is (words is part.rehearsal)
            assert len(options.parts) == 1
        for word in words:
            if word.startswith("tests/"):
                assert (run_all.ROOT / word).exists(), word


def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where no wheels were brought, and none is needed where all is there."""
    monkeypatch.setattr(run_all, "PLUGINS", ())
    monkeypatch.setattr(run_all, "_cupy", lambda: ())
    assert run_all.main(["--install", "", "--dry-run"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "all is there"
    monkeypatch.setattr(run_all, "WHEELS", ("mpi4py", "no-such-package"))
    assert run_all.main(["--install", "", "--dry-run"]) == 1
    told = capfd.readouterr().out
    assert "no-such-package is missing: bring its wheel" in told
    assert "mpi4py is missing" not in told


@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.long
def test_dry_run(tmp_path: Path) -> None:
    """Two ranks start, and the tests that a GPU is wanted for are found."""
    chosen = ["install", "hello", "single", "two_ranks", "two_ranks_jax"]
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
    assert "with_jax" not in logs["two_ranks"]
    assert "test_two_ranks_train_with_jax_as_one[NCCL]" in logs["two_ranks_jax"]
    assert "test_two_ranks" not in logs["single"]
    assert "test_streams_events_and_copies" in logs["single"]
    assert "mpi4py" in logs["install"]

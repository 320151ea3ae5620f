"""The command for a machine with a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from tests.benchmarks import gpu
from tests.gpu import run_all
from tests.gpu.run_all import Outcome, Part
from tests.support.shared import once


def python(name: str, code: str, limit_s: float = 20.0, **details: object) -> Part:
    words = (sys.executable, "-c", code)
    return Part(name, "does it", limit_s, words, words, **details)  # type: ignore[arg-type]


def outcome_of(part: Part, out: Path, limit_s: float = 20.0) -> Outcome:
    return run_all.run(part, limit_s, out, dry_run=False)


def log_of(part: str, out: Path) -> str:
    return (out / part / "log.txt").read_text()


def kept(out: Path) -> dict[str, str]:
    """The files of the archive, by name."""
    with tarfile.open(out / "results.tar") as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


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
    assert log_of("part", tmp_path).splitlines()[-1] == found.last != ""


def test_what_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    """Also children in other sessions, like the ranks of tests; they print their stacks."""
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
    log = log_of("part", tmp_path)
    for words in ("Fatal Python error: ", "Aborted"):  # apart: they print at the same time
        assert log.count(words) == 3
    (pids,) = re.findall(r"^children (\d+) (\d+)$", log, re.MULTILINE)
    for pid in pids:
        for _ in range(1000):
            stat = Path(f"/proc/{pid}/stat")
            if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.05)
        else:
            os.kill(int(pid), 9)
            pytest.fail("a child is still there")


def test_what_has_failed_is_repeated_with_nccls_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others go on; parts skipped for lack of time are repeated too."""
    debug = "import os; print(os.environ['NCCL_DEBUG'], os.environ.get('NCCL_DEBUG_FILE')); "
    known = [
        python("prepare", "print('ready')"),
        python("one", debug + "raise SystemExit(1)"),
        python("two", "print('fine')"),
        python("late", "print('late')"),
    ]
    monkeypatch.setattr(run_all, "parts", lambda out, wheels: known)
    runs = run_all.run

    def run(part: Part, limit_s: float, *rest: object) -> Outcome:
        if part.name == "two":
            monkeypatch.setattr(run_all, "LEAST_S", 1e9)
        return runs(part, limit_s, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(run_all, "run", run)
    assert run_all.main(["--out", str(tmp_path), "--budget-s", "1e6"]) == 1
    shown = capsys.readouterr().out
    for row in ("one        failed", "two        passed", "late       left out", "no time is left"):
        assert row in shown, shown
    assert f"run_all.py --out {tmp_path} --again one late" in shown
    files = kept(tmp_path)
    assert files["one/log.txt"].endswith("WARN None\n")
    assert files["two/log.txt"].endswith("fine\n")
    assert files["table.txt"] in shown
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(
        ["results.tar", "summary.json", "table.txt"]
    )

    monkeypatch.setattr(run_all, "run", runs)
    monkeypatch.setattr(run_all, "LEAST_S", 1.0)
    assert run_all.main(["--out", str(tmp_path), "--again"]) == 1
    files = kept(tmp_path)
    assert sorted(files) == [
        *("late/log.txt", "one/log.txt", "prepare/log.txt", "summary.json", "table.txt")
    ]
    assert f"INFO {tmp_path}/one/nccl.%h.%p.txt" in files["one/log.txt"]
    assert run_all.main(["--out", str(tmp_path), "--again", "two"]) == 0
    told = json.loads((tmp_path / "summary.json").read_text())
    assert [(each["name"], each["verdict"]) for each in told] == [
        ("prepare", "passed"),
        ("two", "passed"),
    ]
    with pytest.raises(SystemExit):
        run_all.arguments(["--again", "three"])


@pytest.mark.parametrize("part", run_all.parts(Path("out"), Path()), ids=lambda part: part.name)
def test_what_is_run_is_there(part: Part) -> None:
    """Options that are known, and files that exist."""
    for words in (part.command, part.rehearsal):
        if "tests.benchmarks" in words:
            options = gpu.arguments(words[words.index("gpu") + 1 :])
            assert options.rehearse is (words is part.rehearsal)
            assert options.parts == ["pack"]
        for word in words:
            if word.startswith("tests/"):
                assert (run_all.ROOT / word).exists(), word


def dry_run() -> tuple[str, list[dict[str, object]], dict[str, str]]:
    """What it prints, its summary, and its files; run once."""
    chosen = ["prepare", "start", "two", "jax", "sanitizer"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        command = [sys.executable, str(Path(run_all.__file__)), "--dry-run", "--out", folder]
        command += ["--budget-s", "270"]
        done = subprocess.run(
            [*command, "--parts", *chosen], capture_output=True, text=True, timeout=290
        )
        return done.stdout, json.loads((out / "summary.json").read_text()), kept(out)


@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("prepare", ["all is there"]),
        ("start", ["rank 0 of 2: ", "rank 1 of 2: ", "the sum of ranks is 3.0"]),
        ("two", ["checks over NCCL; largest difference "]),
        ("jax", ["checks over NCCL; largest difference "]),
        ("sanitizer", ["test_packing_can_be_captured"]),
    ],
)
def test_dry_run(name: str, words: list[str]) -> None:
    """The programs for a GPU train on a software device, on two ranks."""
    shown, summary, files = once("the dry run for a GPU", dry_run)
    log = files[f"{name}/log.txt"]
    assert {each["name"]: each["verdict"] for each in summary}[name] == "passed", log
    assert f"{name:10} passed" in shown
    for word in words:
        assert word in log

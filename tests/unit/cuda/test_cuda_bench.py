"""The GPU benchmark, as far as it goes without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import gpu
from tests.benchmarks.gpu import ALONE, AUTO, DDP, LARGE, TINY, ratio


def test_mixes_are_those_of_the_targets() -> None:
    assert (len(LARGE.sizes), sum(LARGE.sizes)) == (160, 100_000_000)
    assert len(TINY.sizes) == 107


def test_ratio_compares_within_rounds() -> None:
    """A machine that gets slower in between does not change it."""
    seconds = {DDP: [1.0, 10.0, 100.0], AUTO: [2.0, 20.0, 200.0]}
    assert ratio(seconds, AUTO, DDP) == "2.000"
    assert ratio(seconds, AUTO, ALONE) == "-"


def test_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert gpu.main([]) == 1
    assert "cupy is not installed: pip install 'wfbp[cuda12,torch]'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--parts", "three"], ["--rounds", "1"]])
def test_mistakes(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.arguments(words)


@pytest.mark.parallel
@pytest.mark.slow
def test_rehearsal(tmp_path: Path) -> None:
    """The ranks start, agree with the reference, and return what is shown and written."""
    file = tmp_path / "all.json"
    command = [sys.executable, "-m", "tests.benchmarks", "gpu", "--rehearse", "--parts", "one"]
    done = subprocess.run(
        [*command, "--rounds", "2", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(file.read_text())["training"]
    assert run["ranks"] == 1
    assert {ALONE, DDP, AUTO} <= set(run["seconds"])
    assert all(len(values) == 2 for values in run["seconds"].values())
    assert run["reports"][AUTO]["num_groups"] > 0, "the single rank exchanged with itself"
    assert AUTO in done.stdout

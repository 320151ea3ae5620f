"""The GPU benchmark, as far as it goes without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks import gpu
from tests.benchmarks.gpu import (
    DDP,
    ENOUGH_ROUNDS,
    LARGE,
    PACK,
    TINY,
    UNPACK,
    Timing,
    Training,
    pack_targets,
    training_targets,
    verdicts,
)
from tests.benchmarks.harness import AUTO, NO_COMMUNICATION


def training(num_ranks: int = 1, **step_s: tuple[float, ...]) -> Training:
    names = {"bare": NO_COMMUNICATION, "ddp": DDP, "auto": AUTO}
    steps = {names[name]: values for name, values in step_s.items()}
    return Training("gpt", "GPT", 3, 12, num_ranks, steps, dict.fromkeys(steps, 0.0), {})


def test_mixes_are_those_of_the_promises() -> None:
    assert (len(LARGE.sizes), sum(LARGE.sizes)) == (160, 100_000_000)
    assert len(TINY.sizes) == 107


def test_targets_of_packing() -> None:
    timings = [
        Timing(mix.name, 1, way, median_us, 1.0, of_copy)
        for mix, median_us, of_copy in ((LARGE, 70.0, 1.1), (TINY, 5.0, 1.5))
        for way in (PACK, UNPACK)
    ]
    assert [target.verdict for target in pack_targets(timings)] == ["met"] * 4
    slow = [Timing(t.mix, 1, t.way, 2.5 * t.median_us, 1.0, 1.2) for t in timings]
    missed = list(pack_targets(slow))
    assert [target.verdict for target in missed] == ["missed"] * 4
    told = verdicts([*pack_targets(timings), missed[0]])
    assert told.startswith("targets: 4 of 5 met; 100 MB in 160 tensors: wfbp, pack: over device")
    assert told.endswith("1.200, limit 1.176: missed")


def test_targets_of_training() -> None:
    rounds = ENOUGH_ROUNDS
    one = training(bare=(1.0,) * rounds, ddp=(1.2,) * rounds, auto=(1.005,) * rounds)
    two = training(2, ddp=(2.0,) * rounds, auto=(2.1,) * rounds)
    short = training(2, ddp=(2.0,), auto=(1.9,))
    found = [(t.model, t.what, t.verdict) for t in training_targets([one, two, short])]
    assert found == [
        ("gpt, 1 rank", "auto over DDP", "met"),
        ("gpt, 1 rank", "auto over the bare optimizer", "met"),
        ("gpt, 2 ranks", "auto over DDP", "missed"),
        ("gpt, 2 ranks", "auto over DDP", "undecided"),
    ]


def test_ratio_compares_within_rounds() -> None:
    """A machine that gets slower in between does not change it."""
    run = training(ddp=(1.0, 10.0, 100.0), auto=(2.0, 20.0, 200.0))
    assert run.ratio(AUTO, DDP) == 2.0
    assert run.ratio(AUTO, NO_COMMUNICATION) is None


def test_training_survives_json() -> None:
    run = training(ddp=(1.0, 2.0), auto=(3.0, 4.0))
    assert Training.from_json(json.loads(json.dumps(run.to_json()))) == run


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
    """The ranks start, agree with the reference, and hand back what is shown and written."""
    file = tmp_path / "all.json"
    command = [sys.executable, "-m", "tests.benchmarks", "gpu", "--rehearse", "--parts", "one"]
    done = subprocess.run(
        [*command, "--rounds", "2", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    (run,) = document["training"]
    assert run["num_ranks"] == 1
    assert set(run["step_s"]) == {NO_COMMUNICATION, DDP, AUTO}
    assert all(len(values) == 2 for values in run["step_s"].values())
    assert run["differences"][AUTO] == 0.0
    assert run["reports"][AUTO]["num_groups"] > 0, "the single rank exchanged with itself"
    assert document["targets"] == [], "a rehearsal judges nothing"
    assert AUTO in done.stdout

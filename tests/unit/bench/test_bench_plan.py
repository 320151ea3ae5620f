"""The planner benchmark runs and tells what it measured."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import plan as bench


def test_prints_a_row_per_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "NUM_TENSORS", (1000,))
    monkeypatch.setattr(bench, "MAX_CURVE_TENSORS", 30)
    assert bench.main(["--rounds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(bench.cases())
    assert "numpy" in lines[0]
    assert bench.main(["--rounds", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["results"]) == len(bench.cases())
    assert all(0 < r["least_ms"] <= r["median_ms"] for r in data["results"])


def test_bad_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["--rounds", "0"])
    assert caught.value.code == 2
    assert "--rounds: expected at least 1, found 0" in capsys.readouterr().err


def test_made_up_traces_are_the_same_each_time() -> None:
    assert bench.make_trace(20) == bench.make_trace(20)
    assert bench.make_trace(20) != bench.make_trace(20, seed=1)

"""The planner benchmark runs and tells what it measured."""

from __future__ import annotations

import pytest

from tests.benchmarks import plan as bench


def test_prints_a_row_per_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "NUM_TENSORS", (1000,))
    monkeypatch.setattr(bench, "MAX_CURVE_TENSORS", 30)
    assert bench.main(["--rounds", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count(" linear ") == sum(case.cost == "linear" for case in bench.cases())
    assert told.count("measured curve") == 2


def test_made_up_traces_are_the_same_each_time() -> None:
    assert bench.make_trace(20) == bench.make_trace(20)
    assert bench.make_trace(20) != bench.make_trace(20, seed=1)

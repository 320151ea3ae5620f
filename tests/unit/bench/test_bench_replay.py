"""Replays of the real runtime on an emulated link: that they run, and what they report."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("rich")

from tests.benchmarks import replay
from tests.benchmarks.__main__ import main
from tests.support.cli_runs import cost_file
from wfbp.config import Config
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec

FORWARD_S, BACKWARD_S = 4e-4, 8e-4


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options: a trace of five layers, and a link that is soon measured."""
    trace = Trace(
        "small",
        tuple(
            TraceTensor(TensorSpec(f"layer{k}", (20_000 + k,), "float32"), FORWARD_S, BACKWARD_S)
            for k in range(5)
        ),
    )
    (tmp_path / "trace.json").write_text(json.dumps(trace.to_json()))
    link = {"alpha_s": 2e-5, "beta_s_per_byte": 5e-10}
    cost = cost_file(tmp_path, all_reduce=link)
    return ["--trace", str(tmp_path / "trace.json"), "--cost", str(cost), "--iterations", "3"]


def test_replays(
    files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("layerwise", "single", "independent")
    schedules = [f"--schedule={name}" for name in names]
    monkeypatch.setattr(replay, "Config", partial(Config, probe_budget_s=0.05))
    monkeypatch.setattr(sys, "argv", ["bench", "replay", *files, *schedules, "--json"])
    assert main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["schedule"] for row in rows] == list(names)
    assert [row["num_groups"] for row in rows[:2]] == [5, 1]
    for row in rows:
        assert (row["model"], row["link"]) == ("small", "cost")
        # Compute is sleep, which nothing makes shorter.
        assert row["measured_s"] >= 5 * (FORWARD_S + BACKWARD_S)
        assert row["planned_s"] >= row["lower_bound_s"] > 0
        assert row["error"] == pytest.approx(row["measured_s"] / row["installed_s"] - 1)

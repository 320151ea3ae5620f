"""What the runtime records of a run, on ranks as threads."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import all_well, run_ranks
from wfbp.config import Config
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.trace import Trace
from wfbp.core.types import TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.recorder import KEPT_ITERATIONS
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime

SPECS = tuple(TensorSpec(f"layer{k}", (100 + k,), "float32") for k in range(5))
CONFIG = replace(
    Config(), warmup_steps=1, profile_steps=2, replan_threshold=0.0, probe_budget_s=0.0
)


def train(num_ranks: int, steps: int, folder: Path, names: tuple[str, ...] = ("SGD",)) -> None:
    """Run engines of these names on every rank for some steps, then close them."""

    def body(runtime: Runtime) -> None:
        engines = [
            Reducer(runtime, SPECS, ReducerOptions("oasr", 1 << 20, name=name)) for name in names
        ]
        gradients = [np.full(spec.shape, runtime.rank, np.float32) for spec in SPECS]
        for _ in range(steps):
            for engine in engines:
                for index in reversed(range(len(SPECS))):
                    data = gradients[index]
                    engine.mark_ready(index, data.__array_interface__["data"][0], data)
                engine.synchronize()
        for engine in engines:
            engine.close()

    all_well(run_ranks(num_ranks, body, replace(CONFIG, record=str(folder))))


def documents(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


def test_every_rank_records_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    train(3, 40, folder)
    found = documents(folder)
    assert list(found) == [f"SGD.rank{rank}.json" for rank in range(3)]
    for rank, data in enumerate(found.values()):
        assert (data["format"], data["rank"], data["size"]) == ("wfbp-run/1", rank, 3)
        assert data["report"]["phase"] == "installed"
        assert data["report"]["steps"] == 40
        assert data["about"]["model"] == ""  # these are arrays
        assert data["about"]["command"].split()[0] == sys.orig_argv[0]
        plan = Plan.from_json(data["plan"])
        assert plan.digest == data["report"]["plan_digest"]
        trace, costs = Trace.from_json(data["trace"]), Costs.from_json(data["costs"])
        assert {t.name for t in trace.specs} == {s.name for s in SPECS}
        assert costs.all_reduce(1000) > 0
        assert len(data["iterations"]) == KEPT_ITERATIONS
        for iteration in data["iterations"]:
            assert [g["group"] for g in iteration["groups"]] == list(range(len(plan.groups)))
            assert all(0 < s <= iteration["closed_s"] for s in iteration["ready_s"])
            for group in iteration["groups"]:
                ends = (group["start_s"], group["packed_s"], group["end_s"], iteration["done_s"])
                assert list(ends) == sorted(ends)


def test_engines_of_one_name_get_files_of_their_own(tmp_path: Path) -> None:
    train(2, 3, tmp_path, ("Adam W", "Adam W"))
    names = [f"Adam-W{number}.rank{rank}.json" for number in ("", "-2") for rank in range(2)]
    assert sorted(documents(tmp_path)) == sorted(names)


def test_a_run_that_ends_before_its_plan_says_so(tmp_path: Path) -> None:
    train(2, 1, tmp_path)
    for data in documents(tmp_path).values():
        assert data["report"]["phase"] != "installed"
        assert data["trace"] is None
        assert data["costs"] is None
        assert len(data["iterations"]) == 1


def test_recording_never_ends_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wfbp.runtime.timeline_files.os.replace", full)
    with caplog.at_level(logging.WARNING, "wfbp"):
        train(2, 40, tmp_path)  # written, or not, more than once
    told = [text for text in caplog.messages if "could not be recorded" in text]
    (line,) = told  # for all ranks, and all writes
    assert re.fullmatch(
        rf"rank [01]: the run could not be recorded in {tmp_path}/\S+ \(No space left on device\); "
        r"training continues \(shown once; other ranks may have this problem too\)",
        line,
    )
    assert list(tmp_path.iterdir()) == []


def test_the_directory_comes_from_the_environment() -> None:
    assert Config.from_environment({"WFBP_RECORD": " runs/a "}).record == "runs/a"
    assert Config.from_environment({}).record == ""

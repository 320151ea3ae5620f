"""The benchmark of regret, on made-up measurements."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("mpi4py")

from tests.benchmarks import regret
from tests.benchmarks.harness import Block, ContestantResult, ModelResult
from tests.benchmarks.torch_contestants import MODELS


def result(model: str, link: str = "none", foreign: float = 0.0, **seconds: float) -> ModelResult:
    contestants = tuple(
        ContestantResult(
            name.replace("_", "-"),
            0.0,
            0.0,
            (Block((median_s,) * 2, foreign, 1.0, 0.0, None, settled=True),),
            {"schedule": "oasr", "num_groups": 3, "overlap": False} if "auto" in name else {},
        )
        for name, median_s in seconds.items()
    )
    return ModelResult(model, "A model", 2, 80, 2, link, 0.1, 2, contestants)


def test_regret_is_against_the_best_fixed_schedule_and_nothing_else() -> None:
    start = regret.Start.of(
        result(
            "mlp",
            mpi_per_tensor=0.5,
            wfbp_auto=1.1,
            wfbp_oasr=1.2,
            wfbp_single=1.0,
            wfbp_ps=0.9,
            wfbp_auto_bf16=0.8,
        )
    )
    assert start is not None
    assert start.regret == pytest.approx(1.1)
    assert (start.best, start.plan) == ("single", "oasr, 3 groups, late")
    assert start.fixed_s == {"oasr": 1.2, "single": 1.0}


def test_what_was_disturbed_is_no_start() -> None:
    assert regret.Start.of(result("mlp", foreign=2.0, wfbp_auto=1.0, wfbp_oasr=1.0)) is None
    assert regret.Start.of(result("mlp", wfbp_auto=1.0)) is None


def test_the_table_says_where_the_share_is_missed() -> None:
    made = [result("mlp", wfbp_auto=1.0 + 0.1 * (k == 0), wfbp_oasr=1.0) for k in range(10)]
    made += [result("lstm", wfbp_auto=1.04, wfbp_oasr=1.0)]
    starts = [start for each in made if (start := regret.Start.of(each)) is not None]
    title, header, rows = regret.table(starts)
    assert title == "regret of auto, shared memory"
    assert [row[:5] for row in rows] == [
        ["mlp", "10", "1.000", "1.100", "90%"],
        ["lstm", "1", "1.040", "1.040", "0% (missed)"],
        ["all", "11", "1.000", "1.100", "82% (missed)"],
    ]
    assert len(header) == len(rows[0])
    document = json.loads(json.dumps(regret.document(starts)))
    assert document["starts"][0]["regret"] == pytest.approx(1.1)


def test_the_command_line() -> None:
    options = regret.arguments(["--starts", "3", "--link", "1gbit"])
    assert options.models == list(MODELS)
    assert len(options.models) == 6
    assert {"wfbp-auto", "wfbp-oasr", "wfbp-independent", "wfbp-hybrid"} < set(options.contestants)
    assert "wfbp-ps" not in options.contestants
    assert options.starts == 3


def test_ranks_run_a_module_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(regret, "run_model", lambda model, options, worker: asked.append(worker))
    assert regret.main(["--models", "mlp", "--starts", "1"]) == 1
    (worker,) = asked
    assert find_spec(f"tests.benchmarks.{worker}") is not None

"""Tables and command lines of the training benchmarks, on made-up measurements."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

import torch

import wfbp.torch
from tests.benchmarks import papers, peers, regret, training
from tests.benchmarks.papers import Claim, measured
from tests.benchmarks.training import contestants, print_contestants, save, table
from tests.support.cli_runs import assert_refused
from tests.support.cli_runs import wfbp as wfbp_command
from wfbp.bench import training as ranks
from wfbp.core.types import COMPRESSIONS

CLAIM = Claim("oasr", ("layerwise", "mgwfbp"), "0.84 to 0.95", "a paper")
REPORT = {"predicted_iteration_s": 1.0, "schedule": "oasr", "num_groups": 3, "overlap": False}


def document(others: Iterable[str] = (), **seconds: float | tuple[float, ...]) -> dict[str, Any]:
    """As ``wfbp bench training`` writes it: the rounds of each contestant, 1 s those of others."""
    rounds = {
        name.replace("_", "-"): list(times) if isinstance(times, tuple) else [times, times]
        for name, times in seconds.items()
    }
    rounds |= {name: [1.0, 1.0] for name in others}
    reports = {"wfbp-auto": {**REPORT, "lower_bound_s": 0.8}} if "wfbp-auto" in rounds else {}
    known = {"seconds": rounds, "cpu_seconds": rounds, "reports": reports}
    return {"ranks": 2, "link": "none", **known}


def test_contestants_are_compared_with_the_best_of_each_kind(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = document(none=0.5, mpi_per_tensor=1.0, ddp_1=2.0, ddp_25=3.0, wfbp_auto=1.2)
    rows = {name: cells for name, *cells in table(found)}
    assert rows["wfbp-auto"] == [
        *("1200.0", "0.0", "0.600", "1.200", "", "1000.0", "+20.0%", "1.500", "1200.0"),
        "3 oasr, late",
    ]
    assert rows["ddp-25"][2:5] == ["1.500", "3.000", ""]
    assert table(document(none=1.0))[0][3:6] == ["", "", ""]
    assert table(document(wfbp_auto=1.0, wfbp_oasr=0.8))[0][5] == "1.250"
    print_contestants("A model", found)
    told = capsys.readouterr().out
    assert "A model, 2 ranks, shared memory" in told
    assert all(name in told for name in found["seconds"])


def test_what_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert training.arguments([]).contestants == training.CONTESTANTS
    assert training.arguments([]).models == ["mlp", "resnet50", "gpt", "vgg16"]
    for words in (["--contestants", "none,gloo"], ["--models", "alexnet"], ["--link", "2gbit"]):
        with pytest.raises(SystemExit):
            training.arguments(words)
        assert words[1].split(",")[-1] in capsys.readouterr().err


def test_every_usual_contestant_is_known() -> None:
    for names in (training.CONTESTANTS, papers.CONTESTANTS, regret.FIXED):
        assert contestants(",".join(names)) == list(names)
    assert "wfbp-ps" not in regret.FIXED


def test_regret_is_against_the_best_fixed_schedule_and_nothing_else() -> None:
    found = document(mpi_per_tensor=0.5, wfbp_auto=1.1, wfbp_oasr=1.2, wfbp_single=1.0, wfbp_ps=0.9)
    start = regret.Start.of("mlp", found, training.AUTO, regret.FIXED)
    assert start.regret == pytest.approx(1.1)
    assert (start.best, start.plan) == ("single", "oasr, 3 groups, late")


def test_the_table_of_regret_tells_where_the_share_is_missed() -> None:

    def start(model: str, seconds: float) -> regret.Start:
        found = document(wfbp_auto=seconds, wfbp_oasr=1.0)
        return regret.Start.of(model, found, training.AUTO, regret.FIXED)

    starts = [start("mlp", 1.0 + 0.1 * (k == 0)) for k in range(10)]
    starts.append(start("lstm", 1.04))
    headings, rows = regret.table(starts)
    assert [row[:5] for row in rows] == [
        ["mlp", "10", "1.000", "1.100", "90%"],
        ["lstm", "1", "1.040", "1.040", "0% (missed)"],
        ["all", "11", "1.000", "1.100", "82% (missed)"],
    ]
    assert {len(headings)} == set(map(len, rows))


def test_a_claim_is_compared_with_the_fastest_of_the_others() -> None:
    found = document(wfbp_oasr=(8.0, 9.0, 8.0), wfbp_layerwise=(20.0,) * 3, wfbp_mgwfbp=(10.0,) * 3)
    assert measured(CLAIM, found) == "0.80 (0.80-0.85) of mgwfbp"
    assert measured(Claim("oasr", ("mgwfbp",), "", ""), found) == "0.80 (0.80-0.85)"


@pytest.mark.parametrize(("benchmark", "link"), [(training, "--link"), (peers, "--links")])
def test_compression_reaches_the_optimizers(
    benchmark: Any, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the benchmark to the command that its ranks run, and from there to wfbp alone."""
    jobs: list[Any] = []
    monkeypatch.setattr(training, "document_of", lambda words, *job: jobs.append(words))
    assert benchmark.main(["--models", "mlp", link, "none", "--compression", "int8"]) == 1
    given: list[Any] = []
    monkeypatch.setattr(ranks, "run_or_abort", lambda *arguments: given.append(arguments))
    assert wfbp_command(*jobs[0][2:]).code == 0
    made: list[Any] = []
    monkeypatch.setattr(wfbp.torch, "DistributedOptimizer", lambda *_, **by: made.append(by))
    model = torch.nn.Linear(1, 1)
    for name in ("wfbp-single", "wfbp-oasr/auto:int4", ranks.REFERENCE):
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        ranks.make_contestant(name, model, sgd, given[0][-1])
    found = [(by["schedule"], by["compression"]) for by in made]
    assert found == [("single", "int8"), ("oasr", "auto:int4")]


def test_titles_tell_the_compression(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = document(none=0.5, mpi_per_tensor=1.0, ddp=2.0, wfbp_auto=1.2) | {"compression": "int8"}
    print_contestants("A model", found)
    assert "shared memory, wfbp sends int8" in capsys.readouterr().out
    results = {"none": {"mlp": found}}
    assert list(peers.markdown(results))[-1].endswith(" wfbp sends int8.")
    save(tmp_path / "int8.json", results)
    with pytest.raises(SystemExit):
        peers.main(["--json", str(tmp_path / "int8.json")])
    assert "has results of another compression" in capsys.readouterr().err


def test_each_compression_has_a_tolerance() -> None:
    assert ranks.TOLERANCES.keys() == COMPRESSIONS.keys()
    refused = wfbp_command("bench", "training", "--compression", "int3")
    assert_refused(refused, "'int3' is not one of 'none', 'fp16', 'bf16', 'int8'")

"""Planning with what a run recorded, and with the examples that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_runs import answer, assert_refused, cost_file, wfbp
from tests.support.run_documents import costs, document, record, trace
from wfbp.cli.probe import _check_outputs
from wfbp.core.cost import Costs
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.timeline import timeline


def test_a_run_is_planned_with_its_own_trace_and_costs(tmp_path: Path) -> None:
    data = answer("plan", record(tmp_path, size=3), "--schedule", "oasr")
    times = timeline(plan("oasr", trace(), costs()), trace(), costs())
    assert data["predicted"]["iteration_s"] == pytest.approx(times.iteration_s)


def test_a_timeline_may_lie_beside_the_record(tmp_path: Path) -> None:
    (record(tmp_path) / "timeline.rank0.json").write_text("{}")
    assert answer("plan", tmp_path)["best"] in PLANNERS


def test_the_run_stands_below_the_predictions(tmp_path: Path) -> None:
    outcome = wfbp("plan", record(tmp_path))
    assert all(f" {name} " in outcome.out for name in PLANNERS)
    slowest = document(1, 2)["report"]
    told = f"by mgwfbp in {len(document(0, 2)['plan']['groups'])} messages: "
    told += f"{slowest['measured_iteration_s'] * 1e3:.3f} ms measured, "
    assert told + f"{slowest['exposed_s'] * 1e3:.3f} ms exposed" in outcome.out


def test_a_run_on_another_network(tmp_path: Path) -> None:
    cost = cost_file(tmp_path)
    data = answer("plan", record(tmp_path / "run"), "--cost", cost, "--schedule", "single")
    single = plan("single", trace(), Costs.load(cost))
    times = timeline(single, trace(), Costs.load(cost))
    assert data["predicted"]["iteration_s"] == pytest.approx(times.iteration_s)


def test_a_run_says_among_how_many_its_costs_were_measured(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", size=4)
    files = [tmp_path / "trace.json", tmp_path / "cost.json"]
    for file, data in zip(files, (trace().to_json(), costs().to_json()), strict=True):
        file.write_text(json.dumps(data))
    same = answer("simulate", files[0], "--cost", files[1], "--measured-on", "4")
    assert answer("simulate", folder) == same
    assert_refused(wfbp("simulate", folder, "--measured-on", "8"), "among 4 ranks")
    assert_refused(wfbp("simulate", folder, "--per-link"), "among 4 ranks")


def test_one_of_several_optimizers(tmp_path: Path) -> None:
    record(tmp_path, name="SGD")
    record(tmp_path, name="Adam")
    assert_refused(wfbp("plan", tmp_path), "several optimizers", "--optimizer: Adam, SGD")
    assert answer("plan", tmp_path, "--optimizer", "Adam")["best"] in PLANNERS
    assert_refused(wfbp("plan", tmp_path, "--optimizer", "LBFGS"), "'LBFGS'", "Adam, SGD")
    assert_refused(wfbp("plan", "x.json", "--optimizer", "SGD"), "directory of a run")


def test_a_run_that_ended_early_cannot_be_planned_with(tmp_path: Path) -> None:
    report = document(0, 2)["report"] | {"phase": "warm-up", "steps": 3}
    folder = record(tmp_path, trace=None, costs=None, report=report)
    assert_refused(wfbp("plan", folder), "after 3 steps, in its warm-up phase", "more steps")


def test_examples_have_names() -> None:
    data = answer("plan", "resnet-50", "--cost", "10gbe-16", "--schedule", "single")
    assert data["predicted"]["iteration_s"] == pytest.approx(0.32938, rel=1e-4)
    assert_refused(wfbp("plan", "resnet-50"), "--cost 10gbe-16", "wfbp probe")
    mistyped = wfbp("plan", "resnet50", "--cost", "10gbe-16")
    assert_refused(mistyped, "resnet50: no such file, and no example", "did you mean resnet-50?")
    assert_refused(wfbp("plan", "resnet-50", "--cost", "ib"), "ib: no such", "are 10gbe-16")


def test_a_file_comes_before_an_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resnet-50").write_text(json.dumps(trace().to_json()))
    monkeypatch.chdir(tmp_path)
    data = answer("plan", "resnet-50", "--cost", "10gbe-16", "--schedule", "single")
    assert len(data["groups"][0]["tensors"]) == len(trace().tensors)


def test_examples_are_listed() -> None:
    for command in ("plan", "simulate"):
        told = " ".join(wfbp(command, "--help").out.split())
        assert "Example traces: bert-base, densenet-201," in told
        assert "Example costs: 10gbe-16." in told


def test_probing_checks_files_without_making_them(tmp_path: Path) -> None:
    _check_outputs(str(tmp_path / "cost.json"), None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="is a directory"):
        _check_outputs(str(tmp_path), None)


def test_a_rank_without_a_file_is_named(tmp_path: Path) -> None:
    folder = record(tmp_path, size=3)
    assert "left no file" not in wfbp("plan", folder).out
    (folder / "SGD.rank1.json").unlink()
    assert "1 of 3 ranks left no file here: 1.\n" in wfbp("plan", folder, "--schedule", "oasr").out


def test_a_run_of_more_ranks_than_there_can_be(tmp_path: Path) -> None:
    """A number in a file costs no memory."""
    folder = record(tmp_path / "largest", size=1)
    (folder / "SGD.rank0.json").write_text(json.dumps(document(0, 2) | {"size": 2**24}))
    told = wfbp("plan", folder, "--schedule", "oasr").out
    assert "16777215 of 16777216 ranks left no file here: 1, 2, 3," in told
    assert "and others.\n" in told
    folder = record(tmp_path / "larger", size=1)
    (folder / "SGD.rank0.json").write_text(json.dumps(document(0, 2) | {"size": 10**9}))
    assert_refused(wfbp("plan", folder), "rank0.json: size: expected a whole number from 1 to")


def test_a_plan_of_more_elements_than_there_can_be(tmp_path: Path) -> None:
    data = document(0, 1)
    data["plan"]["tensors"][0]["shape"] = [10**15, 10**15]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "SGD.rank0.json").write_text(json.dumps(data))
    assert_refused(wfbp("plan", folder), "plan: elements of all tensors: expected a whole number")

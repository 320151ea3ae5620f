"""``wfbp report``: what its figures show, and what it says of bad directories."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import assert_refused, wfbp
from tests.support.run_documents import costs, document, record, trace
from wfbp.cli.figures import gantt, median_iteration
from wfbp.cli.report import chapter
from wfbp.cli.run_files import Run, load_runs
from wfbp.core.bound import lower_bound_s
from wfbp.core.fit import MAX_KAPPA
from wfbp.core.planners import PLANNERS, plan
from wfbp.core.timeline import timeline


def only_run(folder: Path) -> Run:
    (run,) = load_runs(str(folder))
    return run


def bars(figure: Any, name: str) -> list[tuple[str, float, float]]:
    """Rows, starts and ends (ms) of the bars of that name."""
    (found,) = (d for d in figure["data"] if d["name"] == name)
    rows = zip(found["y"], found["base"], found["x"], strict=True)
    return [(row, start, start + length) for row, start, length in rows]


def test_a_chapter_has_all_its_figures(tmp_path: Path) -> None:
    result = chapter(only_run(record(tmp_path)))
    headings = [heading for heading, _, _ in result.sections]
    assert headings == [
        "One iteration, rank by rank",
        "What a message costs",
        "All schedules on what was measured",
    ]
    assert result.sections[0][1].startswith("Step 62, of median length among steps 60 to 64.")
    assert result.notes == []
    assert result.verdict == "Compute-bound: T/LB 1.04, nothing to gain by another schedule."
    facts = dict(result.facts)
    assert facts["schedule"] == "mgwfbp"
    assert facts["ranks"] == "2"
    data = document(1, 2)  # the slower rank
    ratio = data["report"]["ratio_to_lower_bound"]
    assert facts["T/LB, measured"].startswith(f"{ratio:.2f} (iteration / lower bound; ")
    assert facts["iteration, measured"] == f"{data['report']['measured_iteration_s'] * 1e3:.1f} ms"
    assert "T/LB is an iteration over the lower bound" in result.sections[2][1]


def test_who_ran_what(tmp_path: Path) -> None:
    command = "python train.py --width 1024 --depth 24 --data /data/a --schedule hybrid --epochs 3"
    about = {"model": "GPT", "command": command, "versions": {"wfbp": "0.1.0", "PyTorch": "2.13"}}
    record(tmp_path, about=about)
    facts = dict(chapter(only_run(tmp_path)).facts)
    assert re.fullmatch(r"GPT: [\d,]+ parameters in 12 tensors", facts["model"])
    assert (facts["command"], facts["versions"]) == (command, "wfbp 0.1.0, PyTorch 2.13")
    text = Path(wfbp("report", tmp_path).out.strip()).read_text()
    assert f"<tr><th>command</th><td>{command}</td></tr>" in text
    assert wfbp("plan", tmp_path).out.startswith("GPT: 12 tensors")


def test_the_chart_shows_what_was_recorded(tmp_path: Path) -> None:
    run = only_run(record(tmp_path))
    index, count = median_iteration(run)
    assert (index, count) == (-3, 5)  # five iterations, each longer than the last
    figure = gantt(run, index, None)
    for rank in (0, 1):
        data = document(rank, 2)
        iteration = data["iterations"][index]
        (backward,) = (b for b in bars(figure, "backward") if b[0] == f"rank {rank} compute")
        assert backward[1] == pytest.approx((trace().forward_s + trace().other_s) * 1e3)
        assert backward[2] == pytest.approx(iteration["closed_s"] * 1e3)
        shown = sorted(b[1:] for b in bars(figure, "messages") if b[0] == f"rank {rank} messages")
        expected = [(g["packed_s"] * 1e3, g["end_s"] * 1e3) for g in iteration["groups"]]
        assert shown == [pytest.approx(pair) for pair in expected]
        (waiting,) = (
            b for b in bars(figure, "waiting for communication") if b[0] == f"rank {rank} compute"
        )
        assert waiting[2] == pytest.approx(iteration["done_s"] * 1e3)


def test_the_prediction_stands_on_the_same_clock(tmp_path: Path) -> None:
    run = only_run(record(tmp_path))
    _, _, figure = chapter(run).sections[0]
    ends = [b[2] for b in bars(figure, "messages") if b[0] == "predicted messages"]
    made = plan("mgwfbp", trace(), costs())
    times = timeline(made, trace(), costs())
    begin_s = trace().forward_s + trace().other_s
    assert ends == pytest.approx([(begin_s + g.end_s) * 1e3 for g in times.groups])


def test_every_schedule_is_compared(tmp_path: Path) -> None:
    figure = chapter(only_run(record(tmp_path))).sections[2][2]
    assert set(figure["data"][0]["y"]) == set(PLANNERS)
    names = [d["name"] for d in figure["data"]]
    assert any(name.startswith("measured (mgwfbp)") for name in names)
    bound_ms = lower_bound_s(trace(), costs()) * 1e3
    (line,) = figure["layout"]["shapes"]
    assert line["name"] == f"lower bound (LB), {bound_ms:.1f} ms"
    assert line["x0"] == line["x1"] == pytest.approx(bound_ms)
    computed, exposed = figure["data"][:2]
    columns = (computed["y"], computed["text"], zip(computed["x"], exposed["x"], strict=True))
    for name, ratio, parts in zip(*columns, strict=True):
        predicted = timeline(plan(name, trace(), costs()), trace(), costs())
        assert sum(parts) == pytest.approx(predicted.iteration_s * 1e3)
        assert ratio == f"T/LB {sum(parts) / bound_ms:.2f}"


def test_an_iteration_under_the_bound_is_no_claim_that_it_cannot_be(tmp_path: Path) -> None:
    figures = {"measured_iteration_s": 2.541e-3, "ratio_to_lower_bound": 2.541 / 3.05}
    for rank in range(2):
        data = changed(rank, **figures)
        (tmp_path / f"SGD.rank{rank}.json").write_text(json.dumps(data))
    result = chapter(only_run(tmp_path))
    different, note = result.notes
    assert "shorter than predicted (2.54 ms instead of " in different
    assert note.startswith("T/LB 0.83: the run was faster than this bound, which rests on compute")
    assert "no schedule can" not in f"{result}"
    out = wfbp("plan", tmp_path).out
    assert "no schedule can" not in out
    assert "ms: the run was faster than this bound" in out
    assert "2.541 ms measured" in out


def test_a_plan_in_another_order_than_the_trace(tmp_path: Path) -> None:
    """The runtime's first plan is in the order of the model, the trace in that of backward."""
    data = document(0, 1)
    count = len(data["plan"]["tensors"])
    data["plan"]["tensors"].reverse()
    for group in data["plan"]["groups"]:
        group["tensors"] = [count - 1 - k for k in group["tensors"]]
    for iteration in data["iterations"]:
        iteration["ready_s"].reverse()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "SGD.rank0.json").write_text(json.dumps(data))
    turned = chapter(only_run(tmp_path / "a")).sections
    straight = chapter(only_run(record(tmp_path / "b", size=1))).sections
    assert turned[1] == straight[1]
    assert bars(turned[0][2], "messages") == bars(straight[0][2], "messages")


def test_an_early_end_is_told(tmp_path: Path) -> None:
    report = document(0, 2)["report"] | {"phase": "warm-up"}
    folder = record(tmp_path, trace=None, costs=None, report=report)
    result = chapter(only_run(folder))
    assert "ended in its warm-up" in result.notes[0]
    assert [heading for heading, _, _ in result.sections] == ["One iteration, rank by rank"]


def test_what_is_not_known_yet_says_so(tmp_path: Path) -> None:
    unknown = dict.fromkeys(("exposed_s", "kappa", "ratio_to_lower_bound"))
    report = document(0, 2)["report"] | unknown | {"phase": "trial"}
    result = chapter(only_run(record(tmp_path, report=report)))
    assert "ended in its trial" in result.notes[0]
    assert result.verdict.startswith("Still choosing (trial)")
    facts = dict(result.facts)
    assert facts["phase"] == "trial"
    for name in ("exposed, measured", "T/LB, measured", "interference (kappa)"):
        assert facts[name] == "not yet: trial"


def test_where_and_when_it_ran(tmp_path: Path) -> None:
    about = {
        "written": "2026-03-01T07:00:00+00:00",
        "host": "node1",
        "library": "MPICH 5",
        "versions": {"wfbp": "0.1.0", "PyTorch": "2.13.0"},
    }
    facts = dict(chapter(only_run(record(tmp_path, about=about))).facts)
    assert facts["written"] == "2026-03-01 07:00:00 UTC"
    assert (facts["hosts"], facts["communication by"]) == ("node1", "MPICH 5")
    assert facts["versions"] == "wfbp 0.1.0, PyTorch 2.13.0"
    assert facts["optimizer"] == "SGD"
    assert facts["model"] == "1,560,000 parameters in 12 tensors"


def test_interference_at_its_cap(tmp_path: Path) -> None:
    report = document(0, 2)["report"] | {"kappa": MAX_KAPPA}
    result = chapter(only_run(record(tmp_path, report=report)))
    assert dict(result.facts)["interference (kappa)"] == "9.00"
    assert "at its cap" in result.notes[0]


def changed(rank: int, **figures: float) -> dict[str, Any]:
    data = document(rank, 2)
    data["report"] |= figures
    return data


def test_a_verdict_names_the_rank_that_is_late(tmp_path: Path) -> None:
    record(tmp_path)
    late = document(1, 2)
    for iteration in late["iterations"]:
        iteration["closed_s"] += 0.013
        iteration["done_s"] += 0.013
    (tmp_path / "SGD.rank1.json").write_text(json.dumps(late))
    assert re.fullmatch(
        r"Rank 0 waits 13\.\d ms of every iteration for rank 1\.",
        chapter(only_run(tmp_path)).verdict,
    )


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({"measured_iteration_s": 0.08}, "2.1 times slower than predicted"),
        (
            {"exposed_s": 0.02},
            "Communication-bound: T/LB 1.04, nothing to gain by another schedule.",
        ),
        (
            {"exposed_s": 0.01, "ratio_to_lower_bound": 1.3, "predicted_iteration_s": 0.05},
            "T/LB 1.30; schedule ",
        ),
        (
            {"exposed_s": 0.01, "ratio_to_lower_bound": 1.3, "predicted_iteration_s": 0.03},
            "no other schedule is predicted to be faster",
        ),
    ],
)
def test_a_verdict_by_figures(figures: dict[str, float], sentence: str, tmp_path: Path) -> None:
    record(tmp_path)
    for rank in range(2):
        data = changed(rank, **figures)
        (tmp_path / f"SGD.rank{rank}.json").write_text(json.dumps(data))
    assert sentence in chapter(only_run(tmp_path)).verdict


@pytest.mark.parametrize(
    ("factor", "told"), [(1.09, ""), (1.12, "12% longer"), (0.92, ""), (0.85, "15% shorter")]
)
def test_a_prediction_that_is_off_is_noted(factor: float, told: str, tmp_path: Path) -> None:
    record(tmp_path)
    for rank in range(2):
        data = changed(rank, predicted_iteration_s=0.04, measured_iteration_s=0.04 * factor)
        (tmp_path / f"SGD.rank{rank}.json").write_text(json.dumps(data))
    notes = chapter(only_run(tmp_path)).notes
    assert len(notes) == bool(told)
    assert not told or notes[0].startswith(f"Measured iterations are {told} than predicted (")


def test_a_run_without_iterations_has_no_chart(tmp_path: Path) -> None:
    result = chapter(only_run(record(tmp_path, iterations=[])))
    assert "One iteration, rank by rank" not in [heading for heading, _, _ in result.sections]


def test_missing_ranks_are_told(tmp_path: Path) -> None:
    folder = record(tmp_path, size=3)
    (folder / "SGD.rank1.json").unlink()
    assert chapter(only_run(folder)).notes == ["1 of 3 ranks left no file here: 1."]


def test_every_engine_is_shown(tmp_path: Path) -> None:
    record(tmp_path, name="SGD")
    record(tmp_path, name="Adam")
    assert [run.name for run in load_runs(str(tmp_path))] == ["Adam", "SGD"]


def test_the_page_goes_where_it_is_told(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    outcome = wfbp("report", record(tmp_path / "run"), "--output", target)
    assert (outcome.code, outcome.out) == (0, f"{target}\n")
    assert target.read_text().startswith("<!DOCTYPE html>")
    nowhere = tmp_path / "missing" / "page.html"
    assert_refused(wfbp("report", tmp_path / "run", "--output", nowhere), str(nowhere))


def test_without_plotly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    monkeypatch.delitem(sys.modules, "wfbp.cli.figures")
    monkeypatch.delattr("wfbp.cli.figures")
    told = wfbp("report", record(tmp_path))
    assert (told.code, told.out) == (1, "")
    assert "pip install 'wfbp[report]'" in told.err


# What is wrong, and where.


def test_directories_that_are_none(tmp_path: Path) -> None:
    assert_refused(wfbp("report", tmp_path / "missing"), "no such directory")
    (tmp_path / "file").write_text("")
    assert_refused(wfbp("report", tmp_path / "file"), "not a directory")
    assert_refused(wfbp("report", tmp_path), "no recorded run", "WFBP_RECORD")


def change(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value at a path."""

    def apply(data: dict[str, Any]) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return apply


BAD: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (change("format", to="wfbp-plan/1"), "expected format 'wfbp-run/1', found 'wfbp-plan/1'"),
    (change("rank", to=2), "rank: expected a whole number from 0 to 1, found 2"),
    (change("report", to=[]), "report: expected an object, found list"),
    (change("report", "kappa", to=float("nan")), "report.kappa"),
    (change("plan", "groups", to=[]), "plan: the groups do not cover"),
    (change("plan", "tensors", to=3), "plan: not a valid"),
    (change("trace", to=5), "trace: not a trace"),
    (change("trace", "tensors", 3, "name", to="other"), "trace: tensors differ"),
    (change("trace", "tensors", 3, "numel", to=7), "layer3"),
    (change("costs", "all_reduce", to={}), "costs: all_reduce: missing"),
    (change("iterations", to={}), "iterations: expected a list"),
    (change("iterations", 1, "ready_s", to=[1]), "iterations[1].ready_s: 1 time for 12 tensors"),
    (change("iterations", 1, "groups", 0, "group", to=99), "iterations[1].groups[0].group: expec"),
]


@pytest.mark.parametrize(("spoil", "word"), BAD)
def test_bad_documents(spoil: Callable[[dict[str, Any]], None], word: str, tmp_path: Path) -> None:
    record(tmp_path)
    for rank in (0, 1):
        data = document(rank, 2)
        spoil(data)
        (tmp_path / f"SGD.rank{rank}.json").write_text(json.dumps(data))
    assert_refused(wfbp("report", tmp_path), word)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"3"])
def test_files_that_hold_no_document(content: bytes, tmp_path: Path) -> None:
    record(tmp_path)
    (tmp_path / "SGD.rank1.json").write_bytes(content)
    assert_refused(wfbp("report", tmp_path))


def test_runs_that_were_mixed(tmp_path: Path) -> None:
    record(tmp_path, size=3)
    record(tmp_path, size=2)
    assert_refused(wfbp("report", tmp_path), "SGD.rank2.json", "of a run with 3 ranks")
    record(tmp_path / "plans")
    other = document(1, 2, schedule="single")
    (tmp_path / "plans" / "SGD.rank1.json").write_text(json.dumps(other))
    assert_refused(wfbp("report", tmp_path / "plans"), "has another plan")
    record(tmp_path / "twice")
    (tmp_path / "twice" / "copy.json").write_text(json.dumps(document(1, 2)))
    assert_refused(wfbp("report", tmp_path / "twice"), "a rank of 'SGD' has two files")

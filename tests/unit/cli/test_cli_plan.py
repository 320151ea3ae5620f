"""``wfbp plan``: its answers, and what it says of bad input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_runs import ROOT, TRACES, answer, assert_refused, cost_file, wfbp, write
from wfbp.core.cost import Costs
from wfbp.core.planners import PLANNERS, RECOMMENDED, plan
from wfbp.core.trace import Trace

RESNET = TRACES / "resnet-50.json"


def small_trace(**changes: Any) -> dict[str, Any]:
    rows = [
        {"name": name, "numel": 1000, "dtype": "float32", "forward_s": 1e-3, "backward_s": 2e-3}
        for name in ("first", "second", "third")
    ]
    return {"format": "wfbp-trace/1", "model": "small", "tensors": rows} | changes


def test_json_is_the_plan_and_its_prediction(tmp_path: Path) -> None:
    """Of each schedule; and the best one is named."""
    cost = cost_file(tmp_path)
    answered = answer("plan", RESNET, "--cost", cost)
    assert answered["format"] == "wfbp-forecasts/1"
    assert [row["schedule"] for row in answered["schedules"]] == list(PLANNERS)
    trace = Trace.load(RESNET)
    names = [spec.name for spec in trace.specs]
    sizes = {spec.name: spec.nbytes for spec in trace.specs}
    alone_s = trace.forward_s + trace.backward_s
    times = {}
    for data in answered["schedules"]:
        assert set(data) == {"format", "schedule", "predicted", "groups"}
        assert data["format"] == "wfbp-forecast/1"
        predicted, schedule = data["predicted"], data["schedule"]
        assert set(predicted) == {
            "iteration_s", "exposed_s", "lower_bound_s", "ratio_to_lower_bound"
        }  # fmt: skip
        ratio = predicted["iteration_s"] / predicted["lower_bound_s"]
        assert predicted["ratio_to_lower_bound"] == pytest.approx(ratio)
        assert predicted["exposed_s"] == pytest.approx(predicted["iteration_s"] - alone_s)
        times[schedule] = predicted["iteration_s"]
        made = plan(schedule, trace, Costs.load(cost))
        assert len(data["groups"]) == len(made.groups)
        for told, group in zip(data["groups"], made.groups, strict=True):
            assert set(told) == {"phase", "operation", "tensors", "nbytes", "start_s", "end_s"}
            assert told["tensors"] == [names[k] for k in group.tensors]
            assert told["nbytes"] == sum(sizes[name] for name in told["tensors"])
            assert told["phase"] == group.phase.value
            assert told["operation"] == group.operation.value
            assert told["end_s"] >= told["start_s"] >= 0
    assert times[answered["best"]] == pytest.approx(min(times.values()), rel=1e-12)
    assert answer("plan", RESNET, "--cost", cost, "--schedule", "hybrid") in answered["schedules"]


def test_compression_shortens_messages_and_costs_processor_time(tmp_path: Path) -> None:
    def predicted(*words: str, s_per_byte: float) -> float:
        cost = cost_file(tmp_path, all_reduce={"alpha_s": 0.0, "beta_s_per_byte": s_per_byte})
        data = answer("plan", RESNET, "--cost", cost, "--schedule", "single", *words)
        seconds: float = data["predicted"]["exposed_s"]
        return seconds

    kinds = ("none", "bf16", "int8")
    slow = {how: predicted("--compression", how, s_per_byte=1e-7) for how in kinds}
    assert slow["none"] == predicted(s_per_byte=1e-7)
    assert slow["bf16"] == pytest.approx(slow["none"] / 2)
    assert 0.25 < slow["int8"] / slow["none"] < 0.35
    assert predicted("--compression", "int8", s_per_byte=0.0) > 0
    assert_refused(
        wfbp("plan", RESNET, "--cost", "10gbe", "--compression", "int3"), "--compression"
    )


def test_a_prediction_by_hand(tmp_path: Path) -> None:
    """Three tensors of 2 ms backward each; messages of 3 ms: the channel is busy from 2 to 11."""
    trace = write(tmp_path / "trace.json", small_trace())
    flat = {"alpha_s": 3e-3, "beta_s_per_byte": 0}
    cost = cost_file(tmp_path, all_reduce=flat)
    data = answer("plan", trace, "--cost", cost, "--schedule", "layerwise")
    assert [g["tensors"] for g in data["groups"]] == [["third"], ["second"], ["first"]]
    assert [g["start_s"] for g in data["groups"]] == pytest.approx([2e-3, 5e-3, 8e-3])
    assert [g["end_s"] for g in data["groups"]] == pytest.approx([5e-3, 8e-3, 11e-3])
    assert data["predicted"]["iteration_s"] == pytest.approx(14e-3)
    assert data["predicted"]["exposed_s"] == pytest.approx(5e-3)


def test_the_table_gives_reasons(tmp_path: Path) -> None:
    code, out, _ = wfbp("plan", RESNET, "--cost", cost_file(tmp_path), "--schedule", "layerwise")
    assert code == 0
    assert "161 groups" in out
    assert "for the channel" in out
    assert out.count("all_reduce") == 161
    assert "T/LB" in out


def test_the_comparison_shows_every_schedule(tmp_path: Path) -> None:
    code, out, _ = wfbp("plan", RESNET, "--cost", cost_file(tmp_path))
    assert code == 0
    data = answer("plan", RESNET, "--cost", cost_file(tmp_path))
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert lines[1] == ["schedule", "messages", "iteration", "exposed", "T/LB", "over", "best"]
    least_s = min(row["predicted"]["iteration_s"] for row in data["schedules"])
    for cells, row in zip(lines[3:-1], data["schedules"], strict=True):
        told = row["predicted"]
        over = f"+{told['iteration_s'] / least_s - 1:.1%}"
        assert cells == [
            row["schedule"],
            str(len(row["groups"])),
            f"{told['iteration_s'] * 1e3:,.3f}",
            f"{told['exposed_s'] * 1e3:,.3f}",
            f"{told['ratio_to_lower_bound']:.3f}",
            "best" if row["schedule"] == data["best"] else over,
        ]
        bound_ms = told["lower_bound_s"] * 1e3
    assert out.rstrip().endswith(f"no schedule can be under {bound_ms:.3f} ms (LB)")


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    trace = small_trace(model="[bold]model[/nonsense]")
    trace["tensors"][0]["name"] = "[red]w[/]"
    path = write(tmp_path / "trace.json", trace)
    code, out, err = wfbp("plan", path, "--cost", cost_file(tmp_path), "--schedule", "layerwise")
    assert (code, err) == (0, "")
    assert "[red]w[/]" in out
    assert "[bold]model[/nonsense]" in out


# What is wrong, and where.


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{'format': 1}", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (small_trace(tensors=[3]), "trace.json: tensors[0]: expected an object"),
    ],
)
def test_bad_traces(content: object, word: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", content)
    assert_refused(wfbp("plan", path, "--cost", cost_file(tmp_path)), word)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    cost = cost_file(tmp_path)
    assert_refused(wfbp("plan", missing, "--cost", cost), str(missing), "no such file")
    assert_refused(wfbp("plan", RESNET, "--cost", missing), str(missing), "no such file")
    (tmp_path / "empty").mkdir()
    assert_refused(wfbp("plan", tmp_path / "empty", "--cost", cost), "empty", "no recorded run")


def test_an_unknown_schedule_names_the_known(tmp_path: Path) -> None:
    told = wfbp("plan", RESNET, "--cost", cost_file(tmp_path), "--schedule", "fastest")
    assert_refused(told, "--schedule is 'fastest'", *PLANNERS)


@pytest.mark.parametrize(
    ("all_reduce", "kappa"),
    [
        ({"alpha_s": 0, "beta_s_per_byte": 1e300}, 0),
        ({"alpha_s": 1e200, "beta_s_per_byte": 0}, 1e100),
        ({"points": [[1, 0], [2, 1e300]]}, 0),
    ],
)
def test_costs_whose_sums_are_beyond_all_numbers(
    all_reduce: dict[str, object], kappa: float, tmp_path: Path
) -> None:
    """Each figure is finite, their sum is not; JSON could not even tell it."""
    cost = cost_file(tmp_path, all_reduce=all_reduce, kappa=kappa)
    told = wfbp("plan", RESNET, "--cost", cost, "--json")
    assert_refused(told, f"{cost}: ", "too large; expected at most 1e+100")


def test_times_whose_sum_is_beyond_all_numbers(tmp_path: Path) -> None:
    trace = small_trace()
    for row in trace["tensors"]:
        row["backward_s"] = 1.7e308
    path = write(tmp_path / "trace.json", trace)
    told = wfbp("plan", path, "--cost", cost_file(tmp_path))
    assert_refused(told, f"{path}: tensors[0]: backward_s: too large")


def test_large_and_small_figures_are_planned_all_the_same(tmp_path: Path) -> None:
    for alpha_s, beta in ((1e90, 1e80), (0.0, 0.0), (1e-300, 5e-324)):
        cost = cost_file(tmp_path, all_reduce={"alpha_s": alpha_s, "beta_s_per_byte": beta})
        for data in answer("plan", RESNET, "--cost", cost)["schedules"]:
            assert data["predicted"]["ratio_to_lower_bound"] >= 1


def test_the_bad_line_stays_one_line(tmp_path: Path) -> None:
    trace = small_trace()
    for row in trace["tensors"]:
        row["name"] = "two\nlines"
    path = write(tmp_path / "trace.json", trace)
    assert_refused(wfbp("plan", path, "--cost", cost_file(tmp_path)), "found twice")


def test_help_and_the_reference_recommend_the_same_schedules() -> None:
    _, out, _ = wfbp("plan", "--help")
    text = " ".join(out.split())
    page = (ROOT / "docs" / "reference" / "schedules.md").read_text()
    table = page.split("## Recommended")[1].split("## ")[0]
    listed = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert tuple(listed) == RECOMMENDED
    assert "Recommended: oasr, hybrid, single. For comparison: layerwise, " in text


def test_extrapolated_times_are_named(tmp_path: Path) -> None:
    points = [[4, 1.5e-5], [2**20, 1.5e-4]]
    document = {"format": "wfbp-cost/1", "all_reduce": {"points": points}, "kappa": 0.0}
    cost = write(tmp_path / "cost.json", document)
    told = wfbp("plan", RESNET, "--cost", cost).out
    assert "all_reduce was measured up to 1.0 MiB" in told
    assert "up to 97.5 MiB, are extrapolated" in told
    small = write(tmp_path / "small.json", small_trace())
    assert "extrapolated" not in wfbp("plan", small, "--cost", cost).out

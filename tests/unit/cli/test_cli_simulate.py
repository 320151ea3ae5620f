"""``wfbp simulate``: other numbers of workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_runs import TRACES, answer, assert_refused, cost_file, wfbp
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.planners import PLANNERS, RECOMMENDED
from wfbp.core.trace import Trace
from wfbp.sim.scaling import ALGORITHMS

RESNET = TRACES / "resnet-50.json"


def test_rows_are_all_workers_with_all_schedules(tmp_path: Path) -> None:
    arguments = ("simulate", RESNET, "--cost", cost_file(tmp_path), "--workers", "4,64")
    data = answer(*arguments, "--schedule", "all")
    assert (data["model"], data["algorithm"]) == ("ResNet-50", "ring")
    assert data["format"] == "wfbp-simulation/1"
    found = [(row["workers"], row["schedule"]) for row in data["results"]]
    assert found == [(workers, name) for workers in (4, 64) for name in PLANNERS]
    trace = Trace.load(RESNET)
    alone_s = trace.forward_s + trace.backward_s
    for row in data["results"]:
        assert row["iteration_s"] >= row["lower_bound_s"] >= alone_s * (1 - 1e-12)
        assert row["exposed_s"] == pytest.approx(row["iteration_s"] - alone_s)
        ratio = row["iteration_s"] / row["lower_bound_s"]
        assert row["ratio_to_lower_bound"] == pytest.approx(ratio)
        assert row["efficiency"] == pytest.approx(alone_s / row["iteration_s"])
        assert row["speedup"] == pytest.approx(row["workers"] * row["efficiency"])
    few, many = (row["control_s"] for row in data["results"][:: len(PLANNERS)])
    assert many == pytest.approx(few * 63 / 3)
    shown = wfbp(*arguments).out
    assert f"at most {many:.2g} s with 64 workers" in shown


def test_compression_of_tensors_that_are_large_enough_for_each_number_of_workers(
    tmp_path: Path,
) -> None:
    cost = cost_file(tmp_path, all_reduce={"alpha_s": 0.0, "beta_s_per_byte": 1e-7})
    words = ("simulate", RESNET, "--cost", cost, "--workers", "1,2,2048", "--schedule", "single")
    exact, small = (
        [row["exposed_s"] for row in answer(*words, "--compression", how)["results"]]
        for how in ("none", "int8")
    )
    assert small[0] == exact[0] == pytest.approx(0.0)
    assert small[1] < 0.5 * exact[1]
    assert small[2] > 0.7 * exact[2], "few tensors have 8 MiB"
    refused = wfbp(*words, "--algorithm", "hierarchical", "--compression", "int8")
    assert_refused(refused, "is not for --algorithm hierarchical")


def test_the_recommended_schedules_are_shown_in_80_columns(tmp_path: Path) -> None:
    """Also in a pipe; ``auto`` is the best one."""
    shown = wfbp("simulate", RESNET, "--cost", cost_file(tmp_path)).out
    heading = next(line for line in shown.splitlines() if "workers" in line).split()
    assert heading == ["workers", *RECOMMENDED[1:], "LB", "best", "efficiency", "speed-up"]
    assert RECOMMENDED[0] == "auto"
    assert max(map(len, shown.splitlines())) <= 80


def test_costs_at_their_own_size_are_those_of_the_plan(tmp_path: Path) -> None:
    cost = cost_file(tmp_path)
    arguments = ("simulate", RESNET, "--cost", cost, "--workers", 16, "--measured-on", 16)
    data = answer(*arguments, "--schedule", "all")
    planned = answer("plan", RESNET, "--cost", cost)
    for row, told in zip(data["results"], planned["schedules"], strict=True):
        assert row["schedule"] == told["schedule"]
        assert row["iteration_s"] == pytest.approx(told["predicted"]["iteration_s"], rel=1e-9)


def test_an_example_says_among_how_many_it_was_measured(tmp_path: Path) -> None:
    arguments = ("simulate", RESNET, "--workers", "16", "--schedule", "layerwise", "--cost")
    cost = cost_file(tmp_path)  # the example's figures
    of_example = answer(*arguments, "10gbe-16")
    assert of_example == answer(*arguments, cost, "--measured-on", 16)
    assert of_example != answer(*arguments, cost)
    assert of_example != answer(*arguments, "10gbe-16", "--measured-on", 4)
    assert "measured among 16 workers" in wfbp(*arguments, "10gbe-16").out
    assert "--measured-on P" in wfbp(*arguments, cost).out
    assert "of one link" in wfbp(*arguments, cost, "--per-link").out


def test_a_cost_file_may_say_so_too(tmp_path: Path) -> None:
    arguments = ("simulate", RESNET, "--workers", "16", "--schedule", "layerwise", "--cost")
    told = answer(*arguments, cost_file(tmp_path), "--measured-on", 16)
    assert answer(*arguments, cost_file(tmp_path, num_ranks=16)) == told
    for wrong in (1, 2.5, "16", True):
        outcome = wfbp(*arguments, cost_file(tmp_path, num_ranks=wrong))
        assert_refused(outcome, "cost.json: num_ranks: expected a whole number from 2 to")


def test_per_link_by_hand(tmp_path: Path) -> None:
    """One message: a ring of 4 has 6 hops, and 1.5 times the bytes over every link."""
    cost = cost_file(tmp_path, all_reduce={"alpha_s": 1e-3, "beta_s_per_byte": 1e-9})
    (row,) = answer(
        "simulate", RESNET, "--cost", cost, "--workers", 4, "--schedule", "single", "--per-link"
    )["results"]
    trace = Trace.load(RESNET)
    message_s = 6e-3 + 1.5e-9 * sum(trace.backward_bytes)
    assert row["exposed_s"] == pytest.approx(message_s)


def test_hierarchical_counts_the_links_within_a_host(tmp_path: Path) -> None:
    """4 workers on one host: 6 hops of links that are 10 times faster."""
    cost = cost_file(tmp_path, all_reduce={"alpha_s": 1e-3, "beta_s_per_byte": 1e-9})
    arguments = ["simulate", RESNET, "--cost", cost, "--workers", 4, "--schedule", "single"]
    arguments += ["--algorithm", "hierarchical"]
    trace = Trace.load(RESNET)
    message_s = 6e-3 + 1.5e-9 * sum(trace.backward_bytes)
    (row,) = answer(*arguments, "--per-link")["results"]
    assert row["exposed_s"] == pytest.approx(message_s / 10)
    # A host's own cost, measured between two of its ranks: two hops of such links.
    two = Costs(LinearCost(2e-3, 1e-9)).to_json()
    (tmp_path / "within.json").write_text(json.dumps(two))
    arguments += ["--within", tmp_path / "within.json"]
    (row,) = answer(*arguments, "--per-link", "--ranks-per-host", 4)["results"]
    assert row["exposed_s"] == pytest.approx(message_s)
    # The same from an all-reduce between two workers, which is two hops of half the bytes each.
    pair = cost_file(tmp_path, all_reduce={"alpha_s": 2e-3, "beta_s_per_byte": 1e-9})
    arguments[3] = pair
    (row,) = answer(*arguments[:-2])["results"]
    assert row["exposed_s"] == pytest.approx(message_s / 10)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm(algorithm: str, tmp_path: Path) -> None:
    arguments = (
        "simulate", RESNET, "--cost", cost_file(tmp_path), "--workers", "4,8", "--algorithm",
        algorithm, "--schedule", "oasr,hybrid",
    )  # fmt: skip
    code, out, _ = wfbp(*arguments)
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert out.startswith(f"ResNet-50 by {algorithm}: iteration in ms (252.864 ms without")
    assert lines[1] == ["workers", "oasr", "hybrid", "LB", "best", "efficiency", "speed-up"]
    data = answer(*arguments)["results"]
    for cells, (oasr, hybrid) in zip(
        lines[3:5], zip(data[::2], data[1::2], strict=True), strict=True
    ):
        fastest = min((oasr, hybrid), key=lambda row: row["iteration_s"])
        shown = [f"{row * 1e3:,.1f}" for row in (oasr["iteration_s"], hybrid["iteration_s"])]
        assert cells[:4] == [str(oasr["workers"]), *shown, f"{oasr['lower_bound_s'] * 1e3:,.1f}"]
        assert cells[5:] == [f"{fastest['efficiency']:.1%}", f"{fastest['speedup']:,.1f}"]


def test_numbers_of_workers(tmp_path: Path) -> None:
    """In order, each once."""
    arguments = ("simulate", TRACES / "vgg-16.json", "--cost", cost_file(tmp_path))
    data = answer(*arguments, "--schedule", "single", "--workers", "4,2, 4")
    assert [row["workers"] for row in data["results"]] == [2, 4]


def test_by_default_from_4_to_2048(tmp_path: Path) -> None:
    data = answer(
        "simulate", TRACES / "vgg-16.json", "--cost", cost_file(tmp_path), "--schedule", "oasr"
    )
    assert [row["workers"] for row in data["results"]] == [2**k for k in range(2, 12)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workers", "0"), ("--workers", "0 is not in the range")),
        (("--workers", "4,,8"), ("--workers", "''")),
        (("--algorithm", "star"), ("--algorithm", "star", *ALGORITHMS)),
        (("--schedule", "fast"), ("--schedule is 'fast'", "hybrid")),
        (("--measured-on", "1"), ("--measured-on",)),
        (("--within", "10gbe-16"), ("--within needs --algorithm hierarchical",)),
        (("--algorithm", "hierarchical", "--within", "none"), ("none: no such file",)),
    ],
)
def test_bad_options(options: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    workers = () if "--workers" in options else ("--workers", "4")
    told = wfbp(
        "simulate", TRACES / "vgg-16.json", "--cost", cost_file(tmp_path), *workers, *options
    )
    assert_refused(told, *words)


def test_results_beyond_all_numbers_are_refused(tmp_path: Path) -> None:
    cost = cost_file(tmp_path, all_reduce={"alpha_s": 1.7e308, "beta_s_per_byte": 1.7e308})
    for algorithm in ALGORITHMS:
        told = wfbp("simulate", RESNET, "--cost", cost, "--algorithm", algorithm)
        assert_refused(told, f"{cost}: all_reduce.alpha_s: too large")
    # Small enough here, but not among so many workers.
    large = cost_file(tmp_path, all_reduce={"alpha_s": 1e99, "beta_s_per_byte": 0})
    assert wfbp("simulate", RESNET, "--cost", large, "--workers", 4).code == 0
    assert_refused(wfbp("simulate", RESNET, "--cost", large, "--workers", 4096), "too large")
    flat = cost_file(tmp_path, all_reduce={"points": [[1, 1e308], [2, 1e308]]})
    assert_refused(wfbp("simulate", RESNET, "--cost", flat), "too large")

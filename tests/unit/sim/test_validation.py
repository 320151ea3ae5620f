"""The model against published measurements and figures. validation.md tells what they mean."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks import validation
from tests.benchmarks.validation import claims
from tests.benchmarks.validation.architectures import densenet, resnet
from tests.benchmarks.validation.measured import (
    CLUSTERS,
    Fit,
    mean_absolute_error,
    measured_rows,
    predict,
    rms,
)
from tests.benchmarks.validation.ratios import (
    EXPECTED_BOUNDS,
    EXPECTED_RATIOS,
    clusters,
    models,
    over_the_bound,
    over_the_optimum,
)
from tests.benchmarks.validation.tables import TABLES
from wfbp.cli.inputs import EXAMPLE_TRACES
from wfbp.core.cost import Costs, LinearCost
from wfbp.core.trace import Trace

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks" / "validation.md"
NUMBER = re.compile(r"[-+]?\d[\d,]*\.?\d*")


@pytest.mark.parametrize(
    ("stem", "built"),
    [
        ("resnet-50", resnet((3, 4, 6, 3), "ResNet-50", 0.25286448044251286)),
        ("densenet-201", densenet(32, 64, (6, 12, 48, 32), "DenseNet-201", 0.218878)),
    ],
)
def test_built_traces_equal_those_at_hand(stem: str, built: Trace) -> None:
    given = Trace.load(EXAMPLE_TRACES / f"{stem}.json")
    assert built.backward_bytes == given.backward_bytes
    for ours, theirs in zip(built.tensors, given.tensors, strict=True):
        assert ours.forward_s == pytest.approx(theirs.forward_s, abs=1e-9)
        assert ours.backward_s == pytest.approx(theirs.backward_s, abs=1e-9)


def test_measured_models_have_their_published_sizes_and_times() -> None:
    sizes = {row.trace.model: sum(row.trace.backward_bytes) // 4 for row in measured_rows()}
    assert sizes == {
        "ResNet-152": 60_192_808,
        "Inception-v4": 42_679_816,
        "DenseNet-161": 28_681_000,
        "DenseNet-201": 20_013_928,
    }
    for row in measured_rows():
        compute_s = row.trace.forward_s + row.trace.backward_s
        assert all(compute_s < min(seconds) for seconds in row.seconds.values())


def fit_on_page(network: str) -> Fit:
    """A row of the page's table; the fits themselves take a minute."""
    pattern = rf"^\| {re.escape(network)} \| (\d+) us \| ([\d.]+) ns \| ([\d.]+) \| ([\d.]+)% \|"
    (row,) = re.findall(pattern, PAGE.read_text(), re.MULTILINE)
    alpha_us, beta_ns, kappa, percent = map(float, row)
    return Fit(Costs(LinearCost(1e-6 * alpha_us, 1e-9 * beta_ns), kappa=kappa), percent / 100)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_predicts_mgwfbp_from_the_other_two_columns(cluster: str) -> None:
    found = fit_on_page(cluster)
    predictions = predict(cluster, found.costs)
    assert mean_absolute_error(predictions) <= 0.08
    assert max(abs(p.error) for p in predictions) <= 0.10
    assert rms(cluster, found.costs) == pytest.approx(found.rms, abs=1e-3)
    line = found.costs.all_reduce
    assert isinstance(line, LinearCost)
    for alpha, beta in ((0.8, 1), (1.2, 1), (1, 0.8), (1, 1.2)):
        near = LinearCost(alpha * line.alpha_s, beta * line.beta_s_per_byte)
        assert rms(cluster, replace(found.costs, all_reduce=near)) > found.rms
    for prediction in predictions:
        assert prediction.lower_bound_s < min(prediction.measured_s, prediction.predicted_s)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_without_interference_the_prediction_is_too_optimistic(cluster: str) -> None:
    blind = fit_on_page(f"{cluster}, kappa held at 0")
    predictions = predict(cluster, blind.costs)
    assert 0.10 < mean_absolute_error(predictions) < 0.25
    assert all(p.error < 0 for p in predictions)
    assert rms(cluster, blind.costs) == pytest.approx(blind.rms, abs=1e-3)
    assert blind.rms > fit_on_page(cluster).rms


@pytest.mark.parametrize("name", EXPECTED_RATIOS)
def test_table_of_iterations_over_the_optimum(name: str) -> None:
    found = over_the_optimum(clusters()[name])
    for column in ("layerwise", "single", "mgwfbp"):
        mean, largest = map(float, EXPECTED_RATIOS[name][column].split("/"))
        ours = found[column]
        assert sum(ours) / len(ours) == pytest.approx(mean, rel=0.15)
        assert max(ours) == pytest.approx(largest, rel=0.03)


@pytest.mark.parametrize("name", ["10GbE-16", "10GbE-64", "IB-64"])
def test_table_of_iterations_over_the_bound(name: str) -> None:
    found = over_the_bound(clusters()[name], ("mgwfbp", "oasr", "dear one ahead", "hybrid"))
    for column, ours in found.items():
        mean = float(EXPECTED_BOUNDS[name][column].split("/")[0])
        assert sum(ours) / len(ours) - 1 == pytest.approx(mean - 1, rel=0.35, abs=0.003)
    order = [sum(found[column]) for column in ("mgwfbp", "oasr", "hybrid")]
    assert order == sorted(order, reverse=True)


def test_headline_of_oasr() -> None:
    """5 to 16% published: nothing to save on fast networks, 15% and more on slow ones."""
    saved = claims.oasr_over_mgwfbp()
    assert max(max(saved[name]) for name in ("10GbE-16", "IB-16", "IB-32", "IB-64")) < 0.05
    assert 0.14 < sum(saved["10GbE-64"]) / len(saved["10GbE-64"]) < 0.17
    assert min(min(values) for values in saved.values()) > -1.1e-3


def test_headline_of_ipart() -> None:
    """94 and 52% published; without overlap no schedule can be left behind by more than 100%."""
    costs = claims.seventy_two_nodes("10GbE-16", 16)
    largest = [claims.largest_ipart_gain(trace, costs) for trace in models()[::2]]
    assert all(0.3 < gains.over_whole < 1.0 for gains in largest)
    assert max(gains.over_layers for gains in largest) > 0.5


def test_headline_of_scaling() -> None:
    """On a ring MG-WFBP ends as a single message; over trees it stays near linear."""
    by_algorithm = {}
    for algorithm in ("ring", "tree"):
        rows = claims.scaling(algorithm)
        by_algorithm[algorithm] = {(r.model, r.workers, r.schedule): r for r in rows}
    for model in ("ResNet-50", "DenseNet-201"):
        ring, tree = by_algorithm["ring"], by_algorithm["tree"]
        assert ring[model, 2048, "mgwfbp"].num_groups == 1
        assert ring[model, 2048, "mgwfbp"].efficiency < 0.6
        assert tree[model, 2048, "mgwfbp"].efficiency > 0.95
        for workers in claims.WORKERS:
            for table in (ring, tree):
                best = table[model, workers, "hybrid"].iteration_s
                for schedule in claims.SCALED:
                    assert best <= table[model, workers, schedule].iteration_s * (1 + 1e-11)


def test_dear_gathers_sooner_than_one_ahead() -> None:
    costs: Costs = clusters()["10GbE-64"]
    found = over_the_bound(costs, ("dear one ahead", "dear"))
    for one_ahead, queued in zip(found["dear one ahead"], found["dear"], strict=True):
        assert queued <= one_ahead * (1 + 1e-12)


FITS = ("measured", "fitted", "kappas")


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.long) for name in FITS), "optimum", "oasr", "ring"],
)
def test_the_page_shows_what_the_command_prints(name: str) -> None:
    """Up to the last digits, which depend on the library that minimises."""
    (shown,) = re.findall(f"<!-- table {name} -->\n\n(.*?)\n\n<!-- end", PAGE.read_text(), re.S)
    printed = TABLES[name]()
    assert NUMBER.sub("#", shown) == NUMBER.sub("#", printed)
    ours, theirs = (
        [float(n.replace(",", "")) for n in NUMBER.findall(t)] for t in (printed, shown)
    )
    assert ours == pytest.approx(theirs, rel=0.02, abs=0.2)


def test_the_page_has_a_place_for_every_table() -> None:
    names = re.findall(r"<!-- table (\w+) -->", PAGE.read_text())
    assert names == list(TABLES)


def test_updating_a_page_changes_tables_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLES, "greedy", lambda: "| instances |")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table greedy -->\nold\n<!-- end greedy -->\nafter\n")
    assert validation.main(["--only", "greedy", "--update", str(page)]) == 0
    text = page.read_text()
    assert text == (
        "before\n<!-- table greedy -->\n\n| instances |\n\n<!-- end greedy -->\nafter\n"
    )
    with pytest.raises(SystemExit, match="2"):
        validation.main(["--only", "oasr", "--update", str(page)])
    assert "no place for table 'oasr'" in capsys.readouterr().err
    assert page.read_text() == text

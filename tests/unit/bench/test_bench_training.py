"""The training benchmark's figures, ratios and targets, on made-up measurements."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("mpi4py")

from rich.console import Console

from tests.benchmarks import training
from tests.benchmarks.harness import (
    Block,
    ContestantResult,
    ModelResult,
    Target,
    check_link_carried,
    prediction_error,
    ratios,
    targets,
)
from tests.benchmarks.torch_contestants import DEFAULTS, PER_TENSOR
from tests.benchmarks.training import model_table, target_table


def block(
    *times: float,
    foreign: float = 0.0,
    thread: float = 0.0,
    sent: float | None = None,
    settled: bool = True,
) -> Block:
    return Block(times, foreign, cpu_s=1.0, thread_s=thread, sent_bytes=sent, settled=settled)


def result(
    link: str = "none",
    predicted: float | None = None,
    *,
    model: str = "mlp",
    bound: float | None = None,
    **seconds: float,
) -> ModelResult:
    def contestant(name: str, median_s: float) -> ContestantResult:
        known = {"predicted_iteration_s": predicted, "lower_bound_s": bound}
        report = known if name == "wfbp-auto" else {}
        blocks = (block(median_s, median_s, thread=median_s / 5),)
        return ContestantResult(name, 0.0, 0.0, blocks, report)

    contestants = tuple(contestant(n.replace("_", "-"), s) for n, s in seconds.items())
    return ModelResult(model, "A model", 2, 80, 2, link, 0.1, 2, contestants)


def test_figures_leave_out_disturbed_and_unsettled_blocks() -> None:
    blocks = (
        block(1.0, 3.0, thread=0.5),
        block(90.0, foreign=0.2),
        block(2.0, 4.0, thread=1.5, sent=100.0),
        block(80.0, settled=False),
    )
    figures = ContestantResult("x", None, 0.0, blocks, {}).figures(max_foreign_cores=0.1)
    assert figures is not None
    assert figures.median_s == 2.5
    assert (figures.num_kept, figures.num_dropped) == (4, 2)
    assert figures.thread_share == pytest.approx((0.5 * 2 / 4 + 1.5 * 2 / 6) / 2)
    assert figures.sent_bytes == 100.0


def test_no_clean_block_gives_no_figures() -> None:
    assert ContestantResult("x", None, 0.0, (block(1.0, foreign=9.0),), {}).figures(0.1) is None


def test_ratios_compare_with_the_best_of_each_group() -> None:
    figures = result(
        none=1.0, mpi_per_tensor=4.0, ddp_1=8.0, ddp_25=10.0, wfbp_auto=5.0, wfbp_oasr=4.5
    ).figures()
    auto = ratios(figures, "wfbp-auto")
    assert auto.to_ddp == pytest.approx(5 / 8)
    assert auto.to_fastest == pytest.approx(5 / 4)
    assert auto.to_fixed == pytest.approx(5 / 4.5)
    assert ratios(result(wfbp_auto=1.0).figures(), "wfbp-auto").to_ddp is None


def test_targets_on_shared_memory() -> None:
    found = targets([result(mpi_per_tensor=1.0, ddp_1=2.0, wfbp_auto=1.1, wfbp_oasr=1.09)])
    assert [(round(t.value, 3), t.limit, t.met) for t in found] == [
        (0.55, 1.0, True),
        (1.1, 1.08, False),
        (1.009, 1.05, True),
    ]


def test_targets_on_the_slow_link() -> None:
    found = {
        t.what: t
        for t in targets([result("1gbit", 1.0, mpi_per_tensor=3.0, ddp_1=1.05, wfbp_auto=1.02)])
    }
    assert found["auto over the best DDP"].met
    assert not found["auto over the best DDP, mean"].met
    assert found["away from its prediction"].value == pytest.approx(0.02)
    assert found["communication thread, of a core"].value == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("link", "model", "limit"),
    [
        ("1gbit", "mlp", 0.95),
        ("1gbit", "resnet50", 0.90),
        ("1gbit", "gpt", 0.90),
        ("1gbit", "vgg16", 0.93),
        ("5gbit", "gpt", 0.97),
    ],
)
def test_targets_of_decoupled_schedules(link: str, model: str, limit: float) -> None:
    def of_ddp(auto: float) -> Target:
        measured = result(link, 1.0, model=model, ddp_1=2.0, ddp_25=1.0, wfbp_auto=auto)
        (found,) = (t for t in targets([measured]) if t.what == "decoupled: auto over the best DDP")
        return found

    assert of_ddp(limit) == Target(
        model, "decoupled: auto over the best DDP", limit, limit, decided=True
    )
    assert of_ddp(limit - 0.001).verdict == "met"
    assert of_ddp(limit + 0.001).verdict == "missed"


def test_decoupled_targets_are_those_of_links_only() -> None:
    shared = result(bound=1.0, ddp_1=1.0, wfbp_auto=0.5)
    assert not [t for t in targets([shared]) if t.what.startswith("decoupled")]


def test_the_target_of_the_lower_bound() -> None:
    def bounds(link: str, bound: float | None) -> list[Target]:
        measured = result(link, 1.0, bound=bound, ddp_1=2.0, wfbp_auto=1.0)
        return [t for t in targets([measured]) if t.what == "decoupled: T/LB"]

    (near,) = bounds("1gbit", 0.95)
    assert near.value == pytest.approx(1 / 0.95)
    assert (near.limit, near.verdict) == (1.08, "met")
    (far,) = bounds("1gbit", 0.9)
    assert far.verdict == "missed"
    assert not bounds("1gbit", None)
    assert not bounds("5gbit", 0.95)


def test_too_few_undisturbed_iterations_decide_nothing() -> None:
    measured = result(mpi_per_tensor=1.0, ddp_1=2.0, wfbp_auto=1.0)
    assert {t.verdict for t in targets([measured])} == {"met"}
    wanting = replace(measured, iterations=3)
    assert {t.verdict for t in targets([wanting])} == {"undecided"}
    disturbed = ContestantResult("ddp-25", 0.0, 0.0, (block(1.0, 1.0, foreign=9.0),), {})
    short = replace(measured, contestants=(*measured.contestants, disturbed))
    assert {t.verdict for t in targets([short])} == {"undecided"}


def test_prediction_error_is_unknown_without_a_prediction() -> None:
    assert prediction_error(result(wfbp_auto=1.0), "wfbp-auto") is None
    assert prediction_error(result(predicted=0.8, wfbp_auto=1.0), "wfbp-auto") == pytest.approx(
        0.25
    )


def test_a_contestant_that_bypassed_the_link_is_refused() -> None:
    honest = {"none": [block(1.0, sent=0.0)], "ddp-1": [block(1.0, sent=101.0)]}
    check_link_carried(honest, 100)
    with pytest.raises(RuntimeError, match="wfbp-auto put 7 bytes"):
        check_link_carried({**honest, "wfbp-auto": [block(1.0, sent=7.0)]}, 100)
    check_link_carried({**honest, "ddp-1-fp16": [block(1.0, sent=46.0)]}, 100)
    with pytest.raises(RuntimeError, match=r"wfbp-auto-bf16 put 44 bytes .* at least 45"):
        check_link_carried({**honest, "wfbp-auto-bf16": [block(1.0, sent=44.0)]}, 100)


def test_json_round_trip_keeps_every_sample() -> None:
    original = result("1gbit", 1.0, mpi_per_tensor=3.0, wfbp_auto=1.02)
    assert ModelResult.from_json(json.loads(json.dumps(original.to_json()))) == original


def test_tables_show_every_contestant_and_verdict() -> None:
    written = io.StringIO()
    console = Console(width=200, file=written)
    shown = result(predicted=1.0, mpi_per_tensor=1.0, ddp_1=2.0, wfbp_auto=1.1)
    console.print(model_table(shown))
    console.print(target_table([shown]))
    text = written.getvalue()
    assert all(c.name in text for c in shown.contestants)
    assert "+10.0%" in text
    assert "met" in text
    assert "missed" in text


def test_reference_always_competes_and_unknown_names_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = training.arguments(["--contestants", "wfbp-auto,none", "--models", "gpt"])
    assert options.contestants == ["none", PER_TENSOR, "wfbp-auto"]
    assert options.models == ["gpt"]
    assert training.arguments([]).contestants == DEFAULTS
    with pytest.raises(SystemExit):
        training.arguments(["--contestants", "horovod"])
    assert "unknown: horovod" in capsys.readouterr().err

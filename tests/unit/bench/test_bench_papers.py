"""Ratios of the published schedules, on made-up measurements."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("mpi4py")

from tests.benchmarks.harness import Block, ContestantResult, ModelResult
from tests.benchmarks.papers import (
    CLAIMS,
    CONTESTANTS,
    Claim,
    claim_rows,
    claim_table,
    measured,
    published_mgwfbp,
    saved,
    shown,
)
from tests.benchmarks.torch_contestants import CONTESTANTS as KNOWN

CLAIM = Claim("oasr", ("layerwise", "mgwfbp"), "0.84 to 0.95", "a paper")


def result(**seconds: tuple[float, ...]) -> ModelResult:
    """A block of one iteration for each time; a negative one was disturbed."""

    def contestant(name: str, times: tuple[float, ...]) -> ContestantResult:
        blocks = tuple(Block((abs(t),), 9.0 if t < 0 else 0.0, 1.0, 0.0, None, True) for t in times)
        return ContestantResult(f"wfbp-{name}", 0.0, 0.0, blocks, {})

    contestants = tuple(contestant(name, times) for name, times in seconds.items())
    return ModelResult("mlp", "A model", 2, 80, 8, "1gbit", 0.1, 2, contestants)


def test_a_claim_is_compared_with_the_fastest_of_the_others() -> None:
    found = result(oasr=(8.0, 9.0, 8.0), layerwise=(20.0, 20.0, 20.0), mgwfbp=(10.0, 10.0, 10.0))
    ratio = measured(CLAIM, found)
    assert ratio is not None
    assert (ratio.over, ratio.value) == ("mgwfbp", 0.8)
    assert (ratio.low, ratio.high) == (pytest.approx(0.8), pytest.approx(0.85))
    assert shown(CLAIM, ratio) == "0.80 (0.80-0.85) of mgwfbp"


def test_disturbed_blocks_do_not_count() -> None:
    """Quartiles are those of rounds in which both were undisturbed."""
    found = result(oasr=(8.0, 8.0, 70.0, -90.0), mgwfbp=(10.0, 10.0, -10.0, 10.0))
    ratio = measured(CLAIM, found)
    assert ratio is not None
    assert (ratio.low, ratio.high) == (pytest.approx(0.8), pytest.approx(0.8))
    assert measured(CLAIM, result(oasr=(8.0, -8.0), mgwfbp=(10.0, 10.0))) is None
    assert measured(CLAIM, result(mgwfbp=(10.0, 10.0))) is None


def test_what_is_saved_has_a_ratio_for_each_claim() -> None:
    found = result(ipart=(2.0, 2.0), ps=(4.0, 4.0))
    rows = saved([found])["claims"]
    assert (
        len(rows) == len(CLAIMS) == claim_table([found]).row_count == len(claim_rows([found])) - 1
    )
    ratios = {row["published"]: row["mlp, 1gbit"] for row in rows}
    assert ratios["0.52"] == {"over": "ps", "ratio": 0.5, "quartiles": [0.5, 0.5]}
    assert ratios["0.66"] is None


def test_every_schedule_of_a_claim_competes() -> None:
    assert set(CONTESTANTS) <= set(KNOWN)
    for claim in CLAIMS:
        assert {f"wfbp-{name}" for name in (claim.schedule, *claim.over)} <= set(CONTESTANTS)
    assert published_mgwfbp("10GbE") == "0.60 to 0.91"

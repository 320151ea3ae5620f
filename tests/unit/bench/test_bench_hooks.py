"""What the wrapper costs on one rank: that whole steps of both optimizers are timed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import wfbp
from tests.support.local import LocalWorld
from wfbp.config import Config

hooks = pytest.importorskip("tests.benchmarks.hooks")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooks, "ALONE", {"tiny": (2, 3, 1), "small": (1, 8, 2)})
    wfbp.init(backend=LocalWorld(1).backend(0), config=Config())
    yield
    wfbp.shutdown()


def test_rows_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.main(["--steps", "3", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["model"] for row in rows] == ["tiny", "small"]
    for row in rows:
        assert row["bare_us"] > 0
        assert row["wrapped_us"] > 0
        # A step cannot get faster than no time at all.
        assert row["added_percent"] > -100


def test_a_table_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.main(["--steps", "3"])
    told = capsys.readouterr().out
    assert "A step on one rank" in told
    assert "tiny" in told
    assert told.count("%") >= 2

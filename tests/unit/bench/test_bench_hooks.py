"""What the wrapper costs on one rank: that whole steps of both optimizers are timed."""

from __future__ import annotations

import json

import pytest

hooks = pytest.importorskip("tests.benchmarks.hooks")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    monkeypatch.setattr(hooks, "ALONE", {"tiny": (2, 3, 1), "small": (1, 8, 2)})


def test_rows_and_table_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    hooks.main(["--steps", "3", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["model"] for row in rows] == ["tiny", "small"]
    for row in rows:
        assert row["bare_us"] > 0
        assert row["wrapped_us"] > 0
    hooks.main(["--steps", "3"])
    told = capsys.readouterr().out
    assert "A step on one rank" in told
    assert all(name in told for name in ("tiny", "small"))

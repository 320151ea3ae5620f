"""The benchmark of codecs runs and tells what it measured."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks import codec
from wfbp import native


def test_every_way_by_every_set_of_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "SIZES", (4096,))
    monkeypatch.setattr(codec, "ROUND_S", 1e-5)
    assert codec.main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["kernels"] for row in rows} == {"portable", native.INSTRUCTIONS}
    assert all(len(row["gb_per_s"]) == 5 for row in rows)
    assert all(speed > 0 for row in rows for speed in row["gb_per_s"].values())
    assert codec.main([]) == 0
    assert "int4, 4 KiB, portable kernels" in capsys.readouterr().out

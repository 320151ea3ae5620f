"""The pictures of the documentation are those of the recorded figures."""

from __future__ import annotations

import runpy
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mpi4py")

from tests.benchmarks import peers

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_steps() -> None:
    draw = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    pictures = draw["drawn"](draw["load"]())
    assert len(pictures) == 7
    for name, picture in pictures.items():
        assert (DOCS / "pictures" / name).read_text() == picture


def test_peers() -> None:
    """Drawn from the table beside it; each label has its place under its bars."""
    page = (DOCS / "benchmarks" / "peers.md").read_text()
    rows = peers.rows_of_page(page)
    measured = {(row.link, row.model) for row in rows}
    assert measured >= set(product(peers.USUAL_LINKS, peers.USUAL_MODELS))
    assert peers.PICTURE.read_text() == peers.picture(peers.drawn(rows))


def test_a_table_is_read_as_it_was_written() -> None:
    seconds = {name: [0.01, 0.02] for name in ("none", "wfbp-auto", "ddp", "mpi-per-tensor")}
    reports = {"wfbp-auto": {"predicted_iteration_s": 0.014}}
    result = {"seconds": seconds, "cpu_seconds": seconds, "reports": reports}
    results = {"1gbit": {"mlp": result}}
    assert "| 1.00 (1.00-1.00) | 1.00 | 14 | 15 / 15 |" in "\n".join(peers.markdown(results))
    (row,) = peers.rows_of_page("\n".join(peers.markdown(results)))
    assert (row.link, row.model) == ("1gbit", "mlp")
    assert row.times == {"ddp-best": 15.0, **dict.fromkeys(seconds, 15.0)}
    assert row.ratio == "1.00 (1.00-1.00)"

"""Traces and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from wfbp.cli.inputs import EXAMPLE_TRACES
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec

TRACES = sorted(EXAMPLE_TRACES.glob("*.json"))
ROW = {"name": "w", "numel": 4, "dtype": "float32", "forward_s": 1.0, "backward_s": 2.0}


def test_the_six_traces_are_here() -> None:
    assert len(TRACES) == 6


@pytest.mark.parametrize("path", TRACES, ids=lambda p: p.stem)
def test_files_load_and_survive_a_round_trip(path: Path) -> None:
    trace = Trace.load(path)
    assert trace.backward_s == trace.ready_times_s[-1] > 0
    assert trace.ready_times_s == sorted(trace.ready_times_s)
    assert sum(trace.backward_bytes) == sum(spec.nbytes for spec in trace.specs)
    assert Trace.from_json(trace.to_json()) == trace


def test_backward_order_is_the_reverse_of_forward_order() -> None:
    rows = (TraceTensor(TensorSpec(n, (k,), "uint8"), 1.0, 1.0 * k) for k, n in enumerate("abc"))
    trace = Trace("t", tuple(rows))
    assert trace.backward_bytes == [2, 1, 0]
    assert trace.ready_times_s == [2.0, 3.0, 3.0]
    assert trace.forward_s == 3.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"numel": -1},
            "tensors[0].numel: expected a whole number from 0 to",
        ),
        ({"numel": True}, "tensors[0].numel: expected a whole number"),
        ({"dtype": "complex32"}, "tensors[0]: dtype 'complex32' cannot be sent; expected one of"),
        ({"forward_s": -1.0}, "tensors[0]: forward_s: expected a finite number of at least 0"),
        ({"backward_s": None}, "tensors[0]: backward_s: expected a number, found None"),
        ({"backward_s": 10**400}, "tensors[0]: backward_s: too large"),
    ],
)
def test_bad_tensors_are_named_in_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"format": "wfbp-trace/1", "tensors": [{**ROW, **change}]}))
    with pytest.raises(ValueError, match=r"trace\.json: ") as caught:
        Trace.load(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not a trace: expected format 'wfbp-trace/1', found 'list'"),
        ({"format": "wfbp-trace/1"}, "tensors: expected a list"),
        ({"format": "wfbp-trace/1", "tensors": []}, "has no tensors"),
        ({"format": "wfbp-trace/1", "tensors": [3]}, r"tensors\[0\]: expected an object"),
        ({"format": "wfbp-trace/1", "tensors": [{"name": "w"}]}, r"tensors\[0\]: missing numel, f"),
        ({"format": "wfbp-trace/1", "tensors": [ROW, ROW]}, "found twice: w"),
        ({"format": "wfbp-trace/1", "tensors": [ROW], "other_s": -1}, "other_s: expected a finite"),
    ],
)
def test_bad_documents(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trace.from_json(document)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\xff"])
def test_not_json(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"trace\.json: not JSON: "):
        Trace.load(path)


def test_bad_times_are_refused_when_made() -> None:
    with pytest.raises(ValueError, match="tensor 'w': forward_s: too large"):
        TraceTensor(TensorSpec("w", (1,), "uint8"), float("inf"), 0.0)
    good = TraceTensor(TensorSpec("w", (1,), "uint8"), 0.0, 0.0)
    with pytest.raises(ValueError, match="trace 't': other_s: expected a finite number"):
        Trace("t", (good,), other_s=float("nan"))

"""How a difference between ranks is reported."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wfbp.core.ranks import differences

A, B = {"a": "float32(3,)"}, {"b": "float64()"}


@given(st.dictionaries(st.text("abc", max_size=3), st.floats(allow_nan=True)), st.integers(1, 5))
def test_equal_ranks_agree(section: dict[str, float], size: int) -> None:
    assert differences({rank: [{}, section] for rank in range(size)}) == ""


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([[A], [A], [{"a": "float32(4,)"}]], "a (ranks 0, 1: float32(3,); rank 2: float32(4,))"),
        ([[A | B], [A]], "b (rank 0: float64(); rank 1: missing)"),
        ([[A], [A | B]], "b (rank 0: missing; rank 1: float64())"),
        ([[{"a": 1}], [{"b": 1}]],
         "a (rank 0: 1; rank 1: missing), b (rank 0: missing; rank 1: 1)"),
        ([[A | B], [B | A]], "the order, from number 1 on (rank 0: a; rank 1: b)"),
        ([[A, {"op": "sum"}], [A, {"op": "max"}]], "op (rank 0: sum; rank 1: max)"),
        ([[A, {"plan": 1}], [A | B, {"plan": 2}], [A, {"plan": 1}]],
         "b (ranks 0, 2: missing; rank 1: float64())"),
        ([[{"op": "sum"}, A], [{"op": "max"}]], "op (rank 0: sum; rank 1: max)"),
    ],
)  # fmt: skip
def test_a_difference_is_named(ranks: list[list[dict[str, Any]]], told: str) -> None:
    assert differences(dict(enumerate(ranks))) == told


def test_many_differences_are_counted() -> None:
    ranks = {rank: [{f"t{k}": rank for k in range(20)}] for rank in range(2)}
    shown = differences(ranks)
    assert shown.startswith("t0 (rank 0: 0; rank 1: 1), t1 ")
    assert shown.endswith("t4 (rank 0: 0; rank 1: 1) and 15 more")

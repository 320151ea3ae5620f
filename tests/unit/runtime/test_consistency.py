"""What ranks tell each other before they start, and how a difference is reported."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wfbp.core.types import TensorSpec
from wfbp.errors import DisagreementError
from wfbp.runtime.consistency import check_specs, encode_specs

A = TensorSpec("a", (3,), "float32")
B = TensorSpec("b", (), "float64")


def said(*specs: TensorSpec, **settings: object) -> bytes:
    return encode_specs(specs, settings)


@given(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8), st.integers(1, 5))
def test_equal_ranks_agree(names: list[str], size: int) -> None:
    specs = [TensorSpec(n, (ord(n), 2), "bfloat16") for n in names]
    check_specs("x", [encode_specs(specs, {"op": "sum", "plan": "1"})] * size)


@pytest.mark.parametrize(
    ("payloads", "told"),
    [
        ([said(A), said(A), said(TensorSpec("a", (4,), "float32"))],
         "a float32(3,) on rank 0 is a float32(4,) on rank 2"),
        ([said(B), said(TensorSpec("b", (), "float32"))],
         "b float64() on rank 0 is b float32() on rank 1"),
        ([said(A, B), said(A)], "b float64() of rank 0 is missing on rank 1"),
        ([said(A), said(A, B)], "b float64() of rank 1 is missing on rank 0"),
        ([said(A, B), said(B, A)],
         "tensor 0 is a float32(3,) on rank 0 and b float64() on rank 1 (the order differs)"),
        ([said(A, op="sum"), said(A, op="average")],
         "op is 'sum' on rank 0 and 'average' on rank 1"),
        ([said(A, active=["a", "b"]), said(A, active=["b", "c"])],
         "active: a on rank 0 only, c on rank 1 only"),
        ([said(A, kind="SGD"), said(A)], "kind is 'SGD' on rank 0 and None on rank 1"),
    ],
)  # fmt: skip
def test_a_difference_is_named(payloads: list[bytes], told: str) -> None:
    with pytest.raises(DisagreementError, match=re.escape(told)) as caught:
        check_specs("my optimizer", payloads)
    assert str(caught.value).startswith("my optimizer: ranks disagree: ")


def test_what_follows_from_a_difference_is_not_named() -> None:
    payloads = [said(A, B, plan="1", active=["a", "b"]), said(A, plan="2", active=["a"])]
    with pytest.raises(DisagreementError) as caught:
        check_specs("x", payloads)
    assert "plan" not in str(caught.value)
    assert "active" not in str(caught.value)


def test_many_differences_are_counted() -> None:
    specs = [TensorSpec(f"t{k}", (1,), "float32") for k in range(20)]
    others = [TensorSpec(f"t{k}", (2,), "float32") for k in range(20)]
    with pytest.raises(DisagreementError, match=r"t4 .* and 15 more") as caught:
        check_specs("x", [encode_specs(specs, {}), encode_specs(others, {})])
    assert "t5" not in str(caught.value)

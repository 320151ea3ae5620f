"""Element types and tensor specs."""

from __future__ import annotations

import pytest

from wfbp.core.types import ITEM_BYTES, Op, TensorSpec, item_bytes


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((0,), 0), ((3,), 3), ((2, 3, 4), 24), ((5, 0), 0)]
)
def test_numbers_of_elements_and_bytes(shape: tuple[int, ...], numel: int) -> None:
    for dtype, size in ITEM_BYTES.items():
        spec = TensorSpec("w", shape, dtype)
        assert spec.numel == numel
        assert spec.nbytes == numel * size


@pytest.mark.parametrize(("dtype", "size"), [("complex64", 8), ("complex128", 16)])
def test_complex_numbers_are_sent_as_pairs_of_reals(dtype: str, size: int) -> None:
    spec = TensorSpec("w", (2, 3), dtype)
    assert (spec.numel, spec.item_bytes, spec.nbytes) == (6, size, 6 * size)
    assert spec.real_dtype == {8: "float32", 16: "float64"}[size]
    assert spec.wire_bytes("bfloat16") == 2 * 6 * 2
    assert spec.wire_bytes("") == spec.nbytes
    for op in Op:
        if op in (Op.MIN, Op.MAX, Op.PRODUCT):
            with pytest.raises(ValueError, match=rf"op is {op}; {dtype} is combined by"):
                op.check_dtype(dtype)
        else:
            op.check_dtype(dtype)


def test_unknown_element_type_lists_the_known() -> None:
    with pytest.raises(ValueError, match="dtype 'complex64' cannot be sent; expected one of fl"):
        item_bytes("complex64")
    with pytest.raises(ValueError, match="dtype 'int8'"):
        TensorSpec("w", (1,), "int8")


def test_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 'w': negative size in shape \(2, -1\)"):
        TensorSpec("w", (2, -1), "float32")


def test_specs_are_equal_by_value() -> None:
    assert TensorSpec("w", (2,), "float32") == TensorSpec("w", (2,), "float32")
    assert TensorSpec("w", (2,), "float32") != TensorSpec("w", (2, 1), "float32")

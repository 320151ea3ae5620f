"""Encoded elements, beside a reference in NumPy and what the format promises."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.codec_reference import BLOCK, Floats, encoded
from wfbp import _native
from wfbp.core.types import CODEC_BLOCK, CODECS, TensorSpec


@pytest.fixture(
    params=dict.fromkeys(["portable", _native.INSTRUCTIONS]), autouse=True, scope="module"
)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.use_instructions(request.param)
    yield
    _native.use_instructions(_native.INSTRUCTIONS)


codecs = pytest.mark.parametrize("codec", CODECS)


def wire_of(count: int, codec: str = "int8") -> np.ndarray:
    return np.zeros(TensorSpec("t", (count,), "float32").wire_bytes(codec), np.uint8)


def sent(
    source: Floats, error: Floats | None = None, codec: str = "int8"
) -> tuple[np.ndarray, Floats]:
    wire, out = wire_of(source.size, codec), np.full(source.size, 7, np.float32)
    _native.encode(source, wire, codec, error)
    _native.decode(wire, out, codec)
    return wire, out


def drawn(count: int, seed: int) -> Floats:
    """Blocks of very different sizes, some of zeros, some with infinity or NaN."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(count).astype(np.float32)
    for start in range(0, count, BLOCK):
        block = values[start : start + BLOCK]
        kind = rng.integers(8)
        if kind == 0:
            block[:] = 0
        elif kind == 1:
            block[rng.integers(block.size)] = rng.choice([np.inf, -np.inf, np.nan])
        elif kind == 2:
            block *= np.float32(1e-40)  # denormal
        else:
            block *= np.float32(10.0 ** rng.integers(-30, 30))
    return values


@codecs
@settings(deadline=None)
@given(count=st.integers(0, 3 * BLOCK + 9), seed=st.integers(0, 10**9), feeds_back=st.booleans())
@example(count=0, seed=0, feeds_back=True)
@example(count=1, seed=1, feeds_back=True)
@example(count=BLOCK + 1, seed=2, feeds_back=True)
def test_same_bits_as_the_reference(codec: str, count: int, seed: int, feeds_back: bool) -> None:
    source = drawn(count, seed)
    error = drawn(count, seed + 1) if feeds_back else None
    if error is not None:
        error[~np.isfinite(error)] = 0
    expected = None if error is None else error.copy()
    wire, out = sent(source, error, codec)
    reference_wire, reference = encoded(source, expected, codec)
    assert wire.tobytes() == reference_wire.tobytes()
    np.testing.assert_array_equal(out, reference)
    if error is not None:
        np.testing.assert_array_equal(error, expected)
    before = np.ones(count, np.float32)
    _native.decode(wire, before, codec, adds=True)
    np.testing.assert_array_equal(before, reference + np.float32(1))


def test_ties_are_rounded_to_even() -> None:
    source = np.zeros(BLOCK, np.float32)
    source[:5] = 127, 0.5, 1.5, 2.5, -2.5
    assert sent(source)[1][:5].tolist() == [127, 0, 2, 2, -2]


def test_int4_spreads_outliers_over_their_group() -> None:
    source = np.random.default_rng(0).standard_normal(BLOCK).astype(np.float32)
    source[17] = 40.0
    _, out = sent(source, None, "int4")
    others = np.arange(BLOCK) % 8 == 17 % 8
    others[17] = False
    assert np.abs(out - source)[others].max() < 40 / 7 / 2, "as rounding without a transform"
    assert np.linalg.norm(out - source) < 0.2 * np.linalg.norm(source)


@codecs
def test_errors_make_up_for_what_is_lost(codec: str) -> None:
    """The sum of what arrives differs from the sum of what was sent by the last error alone."""
    rng = np.random.default_rng(1)
    error, total, arrived = np.zeros((3, BLOCK + 30), np.float32)
    for _ in range(50):
        source = rng.standard_normal(error.size).astype(np.float32)
        _, out = sent(source, error, codec)
        total, arrived = total + source, arrived + out
    np.testing.assert_allclose(total, arrived + error, atol=1e-4)
    assert np.abs(error).max() < (0.05 if codec == "int8" else 1.0)


@codecs
@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_a_block_keeps_its_error(value: float, codec: str) -> None:
    """Without a gradient, because nothing old may be sent, and with infinity or NaN."""
    source, error = np.full(BLOCK, value, np.float32), np.full(BLOCK, 0.25, np.float32)
    _, out = sent(source, error, codec)
    assert (error == 0.25).all()
    np.testing.assert_array_equal(out, 0.0 if value == 0.0 else np.nan)


@codecs
def test_a_gradient_that_cancels_the_error(codec: str) -> None:
    source, error = np.full(BLOCK, -0.25, np.float32), np.full(BLOCK, 0.25, np.float32)
    _, out = sent(source, error, codec)
    assert not error.any()
    assert not out.any()


def test_wrong_arguments() -> None:
    source = np.ones(BLOCK, np.float32)
    with pytest.raises(ValueError, match="256 elements are encoded in 258 bytes, found 256"):
        _native.encode(source, np.zeros(BLOCK, np.uint8), "int8")
    with pytest.raises(ValueError, match="codec 'int3': expected int8, fp8 or int4"):
        _native.encode(source, wire_of(BLOCK), "int3")
    with pytest.raises(ValueError, match="error"):
        _native.encode(source, wire_of(BLOCK), "int8", np.zeros(3, np.float32))


def test_the_block_of_the_reference() -> None:
    assert BLOCK == CODEC_BLOCK

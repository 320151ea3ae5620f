"""Errors of what was encoded, by tensor."""

from __future__ import annotations

import numpy as np

from wfbp.core.types import TensorSpec
from wfbp.runtime.buffers import shard_range
from wfbp.runtime.coded_buffer import ErrorFeedback

SPECS = (TensorSpec("a", (100, 100), "float32"), TensorSpec("b", (30, 300), "float32"))


def test_errors_have_the_size_of_a_tensor_and_of_a_shard() -> None:
    errors = ErrorFeedback(SPECS, 2, 3)
    for index, spec in enumerate(SPECS):
        start, stop = shard_range(spec, 2, 3)
        whole, shard = errors.of(index)
        assert (whole.size, shard.nbytes) == (spec.numel, stop - start)
        assert errors.of(index)[0] is whole


def test_errors_are_scaled_or_dropped() -> None:
    errors = ErrorFeedback(SPECS, 0, 2)
    for index in (0, 1):
        for error in errors.of(index):
            error.fill(1.0)
    errors.scale([0, 5], 0.25)
    assert all(np.all(error == 0.25) for error in errors.of(0))
    assert all(np.all(error == 1.0) for error in errors.of(1))
    errors.of(1)[0][0] = np.nan
    errors.scale(None, 0)
    assert not any(np.any(error) for index in (0, 1) for error in errors.of(index))
    before, _ = errors.of(0)
    errors.forget()
    assert errors.of(0)[0] is not before


def test_shards_of_large_tensors_begin_with_a_block() -> None:
    for spec in SPECS:
        starts = [shard_range(spec, rank, 2)[0] for rank in range(2)]
        assert starts[0] == 0
        assert starts[1] % 1024 == 0
    assert shard_range(TensorSpec("c", (7, 5), "float32"), 1, 2) == (80, 140)

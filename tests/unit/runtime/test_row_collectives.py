"""Collectives that hand rows from rank to rank, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.ranks import all_well, run_ranks
from wfbp.core.types import Op
from wfbp.errors import DisagreementError
from wfbp.runtime import row_collectives
from wfbp.runtime.runtime import Runtime

SIZE = 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_gather_of_uneven_rows(dtype: str) -> None:
    def body(runtime: Runtime) -> Any:
        mine = np.full((runtime.rank, 2), runtime.rank, dtype)
        counts = row_collectives.count_rows(runtime, mine.shape, mine.dtype)
        assert counts == (0, 1, 2)
        return row_collectives.gather_rows(runtime, mine, counts)

    wanted = np.array([[1, 1], [2, 2], [2, 2]], dtype)
    for found in all_well(run_ranks(SIZE, body)):
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("num_rows", [0, 2, 7])
@pytest.mark.parametrize("op", [Op.SUM, Op.MAX])
def test_scatter(num_rows: int, op: Op) -> None:
    arrays = np.random.default_rng(3).integers(-9, 9, (SIZE, num_rows, 2)).astype(np.float32)

    def body(runtime: Runtime) -> Any:
        counts = row_collectives.equal_rows(num_rows, runtime.size)
        return row_collectives.scatter_rows(runtime, arrays[runtime.rank], counts, op)

    whole = arrays.sum(0) if op is Op.SUM else arrays.max(0)
    for found, wanted in zip(
        all_well(run_ranks(SIZE, body)), np.array_split(whole, SIZE), strict=True
    ):
        assert found.tolist() == wanted.tolist()


def test_exchange() -> None:
    arrays = np.arange(SIZE * 6 * 2).reshape(SIZE, 6, 2)

    def body(runtime: Runtime) -> Any:
        return row_collectives.exchange_blocks(runtime, arrays[runtime.rank])

    for rank, found in enumerate(all_well(run_ranks(SIZE, body))):
        wanted = np.concatenate([np.split(array, SIZE)[rank] for array in arrays])
        assert found.tolist() == wanted.tolist()


def test_other_shapes_are_an_error_everywhere() -> None:
    def body(runtime: Runtime) -> Any:
        return row_collectives.exchange_blocks(
            runtime, np.zeros((SIZE, 1 + (runtime.rank == 1))), "blocks"
        )

    for result in run_ranks(SIZE, body):
        assert isinstance(result, DisagreementError)
        assert "blocks" in str(result)

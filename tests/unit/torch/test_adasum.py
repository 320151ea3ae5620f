"""Adasum of tensors on one rank."""

from __future__ import annotations

import pytest
import torch

from wfbp.horovod.torch.adasum import adasum


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1, 0, 3], [0, 2, 0], [1, 2, 3], [1, 2, 3]]).to(dtype)
    found = adasum(list(rows))
    assert found.dtype is dtype
    assert found.tolist() == [1.0, 2.0, 3.0]
    assert adasum([torch.zeros(2), torch.ones(2)]).tolist() == [1.0, 1.0]

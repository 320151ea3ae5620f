"""How a process group combines tensors of each type."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wfbp.torch.distributed.reductions import reduction

PREMUL_SUM: Any = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("dtype", "op", "name"),
    [
        (torch.bool, dist.ReduceOp.AVG, "AVG"),
        (torch.bool, PREMUL_SUM, "PREMUL_SUM"),
        (torch.float32, dist.ReduceOp.BAND, "BAND"),
        (torch.complex64, dist.ReduceOp.MAX, "MAX"),
        (torch.float8_e4m3fn, dist.ReduceOp.SUM, "SUM"),
    ],
)
def test_what_is_not_defined_is_refused(dtype: torch.dtype, op: Any, name: str) -> None:
    expected = f"{name} of {dtype} is not defined; convert the tensor to another type first"
    with pytest.raises(ValueError, match=re.escape(expected)):
        reduction(dtype, op, 2)

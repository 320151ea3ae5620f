"""How a process group combines tensors of each type."""

from __future__ import annotations

import re

import pytest
import torch

from wfbp.torch.distributed.group_collectives import reduction


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.bool, "AVG"),
        (torch.bool, "PREMUL_SUM"),
        (torch.float32, "BAND"),
        (torch.complex64, "MAX"),
        (torch.float8_e4m3fn, "SUM"),
    ],
)
def test_what_is_not_defined_is_refused(dtype: torch.dtype, op: str) -> None:
    expected = f"{op} of {dtype} is not defined; convert the tensor to another type first"
    with pytest.raises(ValueError, match=re.escape(expected)):
        reduction(dtype, op, 2)

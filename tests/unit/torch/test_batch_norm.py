"""SyncBatchNorm without other ranks: what its passes ask of a tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from wfbp.torch import batch_norm
from wfbp.torch.batch_norm import SyncBatchNorm

WAITING = ("new_tensor", "tensor", "item", "tolist", "cpu", "nonzero", "__bool__", "__int__",
           "__float__", "__index__")  # fmt: skip
"""What lets the host wait where tensors lie on a GPU."""


RUNTIME: Any = SimpleNamespace(size=2, rank=0)


class Refusing(TorchFunctionMode):
    """Fails where the host would wait for a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in WAITING, func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks of which this is the only one with data."""
    monkeypatch.setattr(batch_norm.api, "runtime_of", lambda *_: RUNTIME)
    monkeypatch.setattr(batch_norm, "allreduce", lambda x, op, process_set: x)


@pytest.mark.usefixtures("alone")
def test_the_host_waits_for_nothing() -> None:
    """Neither forward nor backward, with the values of PyTorch's layer."""
    torch.manual_seed(0)
    mine, plain = SyncBatchNorm(3), torch.nn.BatchNorm2d(3)
    x, y = (torch.randn(4, 3, 5, 5).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    weight = torch.randn(4, 3, 5, 5)
    with Refusing():
        (mine(x) * weight).sum().backward()
    (plain(y) * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(mine.running_var, plain.running_var)


@pytest.mark.usefixtures("alone")
def test_counts_keep_their_digits() -> None:
    """Also beyond those that float32 has."""
    count = (1 << 24) + 1
    zero, everyone = torch.zeros(1), batch_norm.global_process_set
    assert int(batch_norm._combined(zero, zero, count, RUNTIME, everyone)[2]) == count

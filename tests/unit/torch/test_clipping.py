"""Clipping without other ranks: what it asks of gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from wfbp.torch.clipping import Limit, clip

WAITING = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")
"""What lets the host wait where gradients lie on a GPU."""


class Noting(TorchFunctionMode):
    """Notes what the host would wait for."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in WAITING:
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


def test_a_norm_beyond_all_numbers_is_infinite() -> None:
    """On a rank alone it must not raise: the others wait for its part."""
    runtime: Any = SimpleNamespace(rank=0, where="rank 0 of 1")
    huge = [torch.full((2,), 1e200, dtype=torch.float64)]
    assert clip(runtime, None, Limit(1.0, 2.0, False), huge, []) == (math.inf, 0.0)
    huge = [torch.full((2,), 1e200, dtype=torch.float64)]
    with pytest.raises(RuntimeError, match="the norm of the gradients is inf"):
        clip(runtime, None, Limit(1.0, 2.0, True), huge, [])


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
def test_the_host_waits_for_shards_and_whole_gradients_once_each(norm_type: float) -> None:
    runtime: Any = SimpleNamespace(rank=0, where="rank 0 of 1")
    torch.manual_seed(0)
    shards, whole = ([torch.randn(5) for _ in range(20)] for _ in range(2))
    expected = float(torch.linalg.vector_norm(torch.cat([*shards, *whole]).double(), norm_type))
    noting = Noting()
    with noting:
        norm, factor = clip(runtime, None, Limit(0.5, norm_type, False), shards, whole)
    assert norm == pytest.approx(expected)
    assert factor == pytest.approx(0.5 / expected)
    assert noting.waits == ["tolist", "tolist"]
    clipped = torch.linalg.vector_norm(torch.cat([*shards, *whole]).double(), norm_type)
    assert float(clipped) == pytest.approx(0.5, rel=1e-3)

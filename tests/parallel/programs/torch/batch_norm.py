"""SyncBatchNorm normalises ranks' batches as torch.nn.BatchNorm does the whole one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks, raises

check = Checks()

SHAPES: list[tuple[int, ...]] = [(6,), (6, 5), (6, 4, 3), (6, 2, 3, 2)]
"""Of a row, channels first."""


def rows(number: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Every rank's batch: of different sizes, far from zero, one of them empty."""
    generator = torch.Generator().manual_seed(number)
    counts = [number % 4, *range(5, 5 + wfbp.size() - 1)]
    return [
        50 + (rank + 1) * torch.randn(count, *shape, generator=generator, dtype=torch.float64)
        for rank, count in enumerate(counts)
    ]


def trains_as_one(plain: nn.Module, shape: tuple[int, ...], steps: int = 3) -> None:
    """Outputs, all gradients and running statistics, step by step; then in evaluation."""
    rank = wfbp.rank()
    synced: Any = wfbp.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    for number in range(steps):
        batches = rows(number, shape)
        whole = torch.cat(batches).requires_grad_()
        mine = batches[rank].clone().requires_grad_()
        weights = torch.linspace(-1, 2, whole.numel(), dtype=whole.dtype).view_as(whole)
        of_mine = weights.split([len(b) for b in batches])[rank]
        wanted, found = plain(whole), synced(mine)
        (wanted.square() * weights).sum().backward()
        (found.square() * of_mine).sum().backward()
        start = sum(len(b) for b in batches[:rank])
        own = slice(start, start + len(mine))
        torch.testing.assert_close(found, wanted[own])
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad[own])
        for theirs, ours in zip(plain.parameters(), synced.parameters(), strict=True):
            total = wfbp.torch.allreduce(ours.grad, op=wfbp.torch.Sum)
            torch.testing.assert_close(total, theirs.grad)
            theirs.grad = ours.grad = None
        for theirs, ours in zip(plain.buffers(), synced.buffers(), strict=True):
            torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(synced.eval()(mine), plain.eval()(mine))


@check
def batch_norm_over_ranks() -> None:
    for shape in SHAPES:
        kind = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(shape) - 1]
        trains_as_one(kind(6, dtype=torch.float64), shape)


@check
def batch_norm_settings() -> None:
    for settings in (
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False, "eps": 0.1},
    ):
        trains_as_one(nn.BatchNorm1d(6, dtype=torch.float64, **settings), (6, 3))  # type: ignore[arg-type]
    layers = nn.Sequential(nn.BatchNorm2d(6), nn.Tanh(), nn.Sequential(nn.BatchNorm2d(6)))
    trains_as_one(layers.double(), (6, 2, 2))


@check
def batch_norm_of_half_precision() -> None:
    layer = wfbp.torch.SyncBatchNorm(3)
    x = (100 + torch.arange(12.0).view(4, 3) + wfbp.rank()).bfloat16().requires_grad_()
    found = layer(x)
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32
    mean = wfbp.torch.allreduce(found.detach().float().mean(0))
    assert mean.abs().max() < 0.02, mean


@check
def batch_norm_of_what_cannot_be() -> None:
    layer = wfbp.torch.SyncBatchNorm(3)
    raises(ValueError, "(N, 3, ...)", "(2, 4)", act=lambda: layer(torch.zeros(2, 4)))
    count = 1 if wfbp.rank() == 0 else 0
    raises(ValueError, "more than one value", act=lambda: layer(torch.zeros(count, 3)))


@check
def buffers_of_the_root() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None))
    for _ in range(1 + wfbp.rank()):
        model(wfbp.rank() + torch.arange(12.0).view(4, 3))
    before = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    wfbp.torch.broadcast_buffers(model)
    after = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    assert after == wfbp.broadcast_object(before, 0)
    assert (after == before) is (wfbp.rank() == 0)
    raises(TypeError, "nn.Module", act=lambda: wfbp.torch.broadcast_buffers(model.state_dict()))  # type: ignore[arg-type]

"""Profiles of forward: first uses, the end, and the model."""

from __future__ import annotations

import contextlib

import torch
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from wfbp.torch.forward_profiler import ForwardProfiler


class Engine:
    """Notes what it is told."""

    profiling = True
    model = ""

    def __init__(self) -> None:
        self.used: list[int] = []
        self.clock = self.recorder = self

    def mark_forward(self, index: int) -> None:
        self.used.append(index)

    def mark_forward_end(self) -> None:
        pass


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_the_model_is_the_outermost_module_with_most_parameters() -> None:
    net, engine = Net(), Engine()
    profiler = ForwardProfiler(engine, list(net.parameters()))  # type: ignore[arg-type]
    profiler.follow()
    other = torch.nn.Linear(1, 1)
    for _ in range(2):
        torch.nn.MSELoss()(other(net(torch.ones(3, 2))), torch.ones(3, 1))
    net.layers[0](torch.ones(1, 2))  # a part of it alone, as checkpointing does
    engine.profiling = False
    profiler.follow()
    assert engine.model == "Net"
    assert engine.used == [0, 1, 2, 3] * 2 + [0, 1]


def test_a_forward_that_raises_is_left() -> None:
    net, engine = Net(), Engine()
    profiler = ForwardProfiler(engine, list(net.parameters()))  # type: ignore[arg-type]
    profiler.follow()
    with contextlib.suppress(RuntimeError):
        net(torch.ones(3, 5))
    profiler.stop()
    assert engine.model == "Net"


def test_garbage_collection_leaves_global_hooks_unchanged() -> None:
    """A module may be about to call them."""
    net, engine = Net(), Engine()
    profiler = ForwardProfiler(engine, list(net.parameters()))  # type: ignore[arg-type]
    profiler.follow()
    hooks = dict(_global_forward_pre_hooks)
    assert hooks
    profiler.abandon()
    assert dict(_global_forward_pre_hooks) == hooks
    net(torch.ones(1, 2))
    assert not _global_forward_pre_hooks
    assert not _global_forward_hooks
    assert engine.used == []

"""Compiled models: gradients that appear before the last graph of backward has run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from wfbp.torch.compiling import compile_backend

LAYER_BYTES = 4 * (16 * 16 + 16)
NUM_LAYERS = 6
BACKWARD = "a graph of backward has run"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def watched(events: list[object]) -> Any:
    """A backend that computes as it is told, and notes when a graph of backward has run."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def backward(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            result = graph(*args)
            events.append(BACKWARD)
            return result

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), bw_compiler=backward
    )


def train(backend: Any, events: list[object]) -> tuple[nn.Module, int, int]:
    """Two steps; the model, how many gradients came before the last graph, and how many graphs."""
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(16, 16), nn.Tanh())]
    model = nn.Sequential(*layers)
    params = list(model.parameters())
    for index, param in enumerate(params):
        param.register_post_accumulate_grad_hook(lambda _, index=index: events.append(index))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend) if backend else model
    for step in range(2):
        events.clear()
        optimizer.zero_grad()
        data = torch.linspace(-1, 1, 64).reshape(4, 16) + step
        compiled(data).square().mean().backward()
        optimizer.step()
        assert sorted(e for e in events if e != BACKWARD) == list(range(len(params)))
    graphs = [k for k, event in enumerate(events) if event == BACKWARD]
    last = graphs[-1] if graphs else 0
    return model, sum(event != BACKWARD for event in events[:last]), len(graphs)


def test_gradients_appear_while_backward_computes() -> None:
    """Those of all pieces but the last; of a model compiled as a whole, none."""
    events: list[object] = []
    plain, _, _ = train(None, events)
    whole, early, graphs = train(watched(events), events)
    assert (early, graphs) == (0, 1)
    torch._dynamo.reset()
    cut, early, graphs = train(compile_backend(watched(events), 2 * LAYER_BYTES), events)
    assert graphs == 3
    assert early == 2 * 4, "two layers in each of the pieces before"
    for one, other, third in zip(*(m.parameters() for m in (plain, whole, cut)), strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, third)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="piece_bytes is 0; expected at least 1"):
        compile_backend(piece_bytes=0)
    model = torch.compile(nn.Linear(2, 2), backend=compile_backend("eager"), mode="max-autotune")
    with pytest.raises(Exception, match=r"given mode, which compile_backend\(\) does not take"):
        model(torch.ones(1, 2))


def test_equal_calls_give_the_same_backend() -> None:
    """PyTorch compiles no further once a function has met more than a few backends."""
    assert compile_backend("eager") is compile_backend("eager")
    assert compile_backend() is compile_backend("inductor")
    other = compile_backend("eager", piece_bytes=100)
    assert other is not compile_backend("eager")

"""Updates that wait for their parameters to be read: several readers, and the end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from torch.overrides import TorchFunctionMode

from wfbp.core.types import TensorSpec
from wfbp.errors import StallError
from wfbp.runtime import process
from wfbp.runtime.step import BufferView
from wfbp.torch import gradient_sync, pending_parameters, tensors, updates
from wfbp.torch.optimizer import AveragingOptimizerBase
from wfbp.torch.updates import ReplicatedUpdate

PATIENCE_S = 60.0


class Arrived:
    """An engine that has gathered everything: a group for each parameter."""

    decoupled = True

    def __init__(self, count: int) -> None:
        self.gather_groups = [[k] for k in range(count)]
        self.specs = [TensorSpec(f"p{k}", (1,), "float32") for k in range(count)]
        self.num_published = 0

    def publish(self) -> None:
        self.num_published += 1

    def now(self) -> float:
        return 0.0

    def mark_update(self, start: float) -> None: ...

    def flush(self) -> None: ...

    def decouples_tensor(self, index: int) -> bool:
        return True

    def await_tensor(self, index: int) -> None: ...

    def gather_gradients(self, reduced: Any, kept: Any) -> Any:
        return reduced


def distributed(optimizer: torch.optim.Optimizer) -> Any:
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (AveragingOptimizerBase, kind), {}))
    made.__dict__.update(optimizer.__dict__)
    return made


def test_who_reads_while_another_thread_updates_waits_for_it() -> None:
    params = [torch.zeros(3), torch.zeros(2)]
    optimizer = distributed(torch.optim.SGD(params, lr=1.0))
    entered, go = threading.Event(), threading.Event()

    def step() -> None:
        if any(group["params"] for group in optimizer.param_groups):
            entered.set()
            assert go.wait(PATIENCE_S)
        torch.optim.SGD.step(optimizer)

    engine = cast(Any, Arrived(len(params)))
    update = ReplicatedUpdate(engine, optimizer, params, step)
    update.apply([BufferView.of(tensors.raw(torch.ones_like(p))) for p in params])
    assert update.pending
    seen: list[list[float]] = []

    def read(index: int) -> None:
        seen.append(params[index].tolist())

    # The later one's update comes with all before it.
    threads = [threading.Thread(target=read, args=(k,)) for k in (1, 0)]
    threads[0].start()
    assert entered.wait(PATIENCE_S)
    assert update.pending, "else nobody would wait"
    # The program goes on with groups, modes and gradients of its own.
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    optimizer.param_groups[0]["lr"] = 100.0
    params[1].grad = own = torch.zeros(2)
    assert torch.is_grad_enabled()
    threads[1].start()
    threads[1].join(0.1)
    assert not seen
    go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(seen) == [[-1.0, -1.0], [-1.0, -1.0, -1.0]]
    assert not update.pending
    assert params[1].grad is own
    assert optimizer.param_groups[0]["lr"] == 100.0


def in_mode(mode: Any) -> Callable[[torch.Tensor], object]:
    def read(param: torch.Tensor) -> None:
        with mode:
            param.tolist()

    return read


@pytest.mark.parametrize(
    "read",
    [
        torch.func.grad(lambda q: (q * q).sum()),
        lambda p: torch.vmap(lambda x: x + p)(torch.zeros(2)),
        in_mode(torch.inference_mode()),
        in_mode(torch.device("meta")),
        in_mode(torch.autocast("cpu")),
    ],
)
def test_an_update_is_apart_from_the_readers_transforms_and_modes(read: Any) -> None:
    param = torch.zeros(1)
    optimizer = distributed(torch.optim.Adam([param], lr=1.0))
    engine = cast(Any, Arrived(1))
    update = ReplicatedUpdate(engine, optimizer, [param], partial(torch.optim.Adam.step, optimizer))
    for number in (1, 2):
        update.apply([BufferView.of(tensors.raw(2 * torch.ones(1)), whole=False)], 0.5)
        read(param)
        assert not update.pending
        assert engine.num_published == number, "streams of other threads would not find it"
        assert torch.allclose(param, torch.tensor(-float(number)))
        state = optimizer.state[param]["exp_avg"]
        assert state.device.type == "cpu"
        assert not state.is_inference()


def test_only_shards_have_yet_to_be_scaled() -> None:
    """What came whole, because it had grown, was scaled where it was clipped."""
    params = [torch.zeros(1), torch.zeros(1)]
    optimizer = distributed(torch.optim.SGD(params, lr=1.0))
    engine = cast(Any, Arrived(2))
    update = ReplicatedUpdate(engine, optimizer, params, partial(torch.optim.SGD.step, optimizer))
    for number in (1, 2):
        slots = [BufferView.of(tensors.raw(torch.ones(1)), whole) for whole in (True, False)]
        update.apply(slots, 0.5)
        assert [p.tolist() for p in params] == [[-1.0 * number], [-0.5 * number]]
    update.apply([BufferView.of(tensors.raw(torch.ones(1)), whole=False) for _ in params])
    assert [p.tolist() for p in params] == [[-3.0], [-2.0]]


def test_what_cannot_be_finished_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    thread = type("Thread", (), {"error": None})

    class Stuck:
        def wait_all(self) -> None:
            thread.error = thread.error or StallError("rank 0 of 2 waited")
            raise thread.error

        def release(self) -> None:
            unfinished.discard(self)

    unfinished: set[Any] = set()
    monkeypatch.setattr(pending_parameters, "unfinished", unfinished)
    runtime: Any = type("Runtime", (), {"thread": thread})
    monkeypatch.setattr(process, "current", lambda call: runtime)
    caplog.set_level(logging.ERROR, "wfbp")
    for _ in range(2):  # the second time, the runtime had ended before
        unfinished |= {Stuck(), Stuck()}
        gradient_sync._finish(runtime)
        assert not unfinished
    assert caplog.messages == ["parameters are not up to date at the end: rank 0 of 2 waited"]


class Mode(TorchFunctionMode):
    """Changes nothing, and is active."""


def test_an_update_outside_of_modes_keeps_the_readers_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread would have the default one, and not wait for what the reader waited for."""
    device, entered = torch.device("cuda", 1), []

    @contextmanager
    def stream(chosen: object) -> Iterator[None]:
        entered.append((threading.get_ident(), chosen))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: ("the reader's", of))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    with Mode():
        worker = updates._outside_modes(threading.get_ident, device)
    assert worker != threading.get_ident()
    assert entered == [(worker, ("the reader's", device))]

"""Updates that wait for their parameters to be read: several readers, and the end."""

from __future__ import annotations

import logging
import threading
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch

from wfbp.core.types import TensorSpec
from wfbp.errors import StallError
from wfbp.runtime.slot import Slot
from wfbp.torch import exchange, tensors
from wfbp.torch.replicated_update import ReplicatedUpdate

PATIENCE_S = 10.0


class Arrived:
    """An engine that has gathered everything: a group for each parameter."""

    decoupled = True
    gathering = False
    update = (0.0, 0.0)

    def __init__(self, count: int) -> None:
        self.gather_groups = [[k] for k in range(count)]
        self.specs = [TensorSpec(f"p{k}", (1,), "float32") for k in range(count)]

    def now(self) -> float:
        return 0.0

    def flush(self) -> None: ...

    def decouples_tensor(self, index: int) -> bool:
        return True

    def await_tensor(self, index: int) -> None: ...

    def gather_gradients(self, reduced: Any, kept: Any) -> Any:
        return reduced


def test_who_reads_while_another_thread_updates_waits_for_it() -> None:
    params = [torch.zeros(3), torch.zeros(2)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    entered, go = threading.Event(), threading.Event()

    def step() -> None:
        if any(group["params"] for group in optimizer.param_groups):
            entered.set()
            assert go.wait(PATIENCE_S)
        torch.optim.SGD.step(optimizer)

    engine = cast(Any, Arrived(len(params)))
    update = ReplicatedUpdate(engine, optimizer, params, step)
    update.apply([Slot.of(tensors.raw(torch.ones_like(p))) for p in params])
    assert update.pending
    seen: list[list[float]] = []

    def read(index: int) -> None:
        update.await_param(index)
        seen.append(params[index].tolist())

    # The later one's update comes with all before it.
    threads = [threading.Thread(target=read, args=(k,)) for k in (1, 0)]
    threads[0].start()
    assert entered.wait(PATIENCE_S)
    assert update.pending, "else nobody would ask before reading"
    threads[1].start()
    threads[1].join(0.1)
    assert not seen
    go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(seen) == [[-1.0, -1.0], [-1.0, -1.0, -1.0]]
    assert not update.pending


def test_what_cannot_be_finished_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck:
        runtime: Any

        def __init__(self, thread: Any) -> None:
            self.runtime = type("Runtime", (), {"thread": thread})

        def flush(self) -> None:
            thread = self.runtime.thread
            thread.error = thread.error or StallError("rank 0 of 2 waited")
            raise thread.error

    caplog.set_level(logging.ERROR, "wfbp")
    thread = type("Thread", (), {"error": None})
    for _ in range(2):  # the second time, the runtime had ended before
        monkeypatch.setattr(exchange, "_unfinished", {Stuck(thread), Stuck(thread)})
        exchange._finish()
        assert not exchange._unfinished
    assert caplog.messages == ["parameters are not up to date at the end: rank 0 of 2 waited"]

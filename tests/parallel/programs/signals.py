"""One rank gets signals whose handler raises, at random moments of what waits for the others.

The program catches that and calls again, or goes on with its next iteration. Parameters must be the
same on all ranks, and those of a training without signals.

Usage: mpirun -n N python signals.py OUT [STEPS].
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import wfbp
import wfbp.torch
from wfbp.runtime import signals
from wfbp.torch.optimizer import SyncState

MEAN_S = 1e-3


class InterruptionError(Exception):
    """What the handler raises."""


class Victim:
    """Sends itself signals, on one rank; ``count`` says how many have raised."""

    def __init__(self) -> None:
        self.chance = random.Random(7)
        self.armed = self.active = False
        self.is_strict = False  # whether code that is not ours is spared
        self.count = 0
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, number: int, frame: FrameType) -> None:
        ours = frame.f_globals["__name__"] == signals.__name__
        if self.armed and (ours or not self.is_strict):
            self.armed = False
            self.count += 1
            raise InterruptionError(f"signal {number}")

    @contextmanager
    def within(self) -> Iterator[None]:
        """A signal comes within it, or soon behind it, where it is ignored."""
        if self.active:
            signal.setitimer(signal.ITIMER_REAL, self.chance.expovariate(1 / MEAN_S) + 1e-6)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)

    def call(self, act: Callable[[], Any], begun: Callable[[], bool] | None = None) -> Any:
        """Call it until it returns; or, where it can tell that it had begun, go on."""
        with self.within():
            while True:
                try:
                    self.armed = True
                    result = act()
                    self.armed = False
                except InterruptionError:
                    if begun is not None and begun():
                        return None
                else:
                    return result


class Peers:
    """Lets this rank come late, so that others wait."""

    def __init__(self) -> None:
        self.chance = random.Random(wfbp.rank())
        self.active = False

    def come_late(self) -> None:
        if self.active and self.chance.random() < 0.7:
            time.sleep(self.chance.random() * 3e-3)


victim: Victim
peers: Peers
steps = 60


def model_of() -> torch.nn.Module:
    torch.manual_seed(3)
    widths = [24, 64, 96, 48, 8]
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(widths)]
    return torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.Tanh())])


def train(way: str, disturbed: bool, **wrap: Any) -> list[torch.Tensor]:
    victim.active = disturbed and wfbp.rank() == wfbp.size() - 1
    peers.active = disturbed
    model = model_of()
    optimizer = wfbp.torch.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-2), model.named_parameters(), **wrap
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    draw = torch.Generator().manual_seed(wfbp.rank())
    for _ in range(steps):
        if way == "model":
            model.zero_grad()
        else:
            optimizer.zero_grad()
        loss = model(torch.randn(8, 24, generator=draw)).square().mean()
        (scaler.scale(loss) if way == "scaler" else loss).backward()
        peers.come_late()
        if way in ("go on", "model"):
            victim.call(optimizer.step, lambda: optimizer._wfbp_left is not None)
        elif way == "synchronize":
            victim.call(optimizer.synchronize)
            with optimizer.skip_synchronize():
                victim.call(optimizer.step)
        elif way == "clip":
            victim.call(lambda: optimizer.clip_grad_norm_(0.1))
            victim.call(optimizer.step)
        elif way == "scaler":
            victim.is_strict = True
            victim.call(lambda: scaler.step(optimizer))
            victim.is_strict = False
            scaler.update()
        else:
            victim.call(optimizer.step)
    victim.active = False
    optimizer.synchronize_parameters()
    return [p.detach().clone() for p in model.parameters()]


def check_training(way: str, **wrap: Any) -> None:
    """Against the same training without signals, and against the other ranks."""
    before = victim.count
    found, expected = train(way, True, **wrap), train(way, False, **wrap)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        everywhere = wfbp.torch.allgather(a[None].contiguous())
        assert all(torch.equal(other, a) for other in everywhere)
    counts = wfbp.allgather_object(victim.count - before)
    assert sum(counts) > steps / 6, counts
    assert not signals.noted


def check_scaler_left_before_the_step() -> None:
    """The scaler has had the averages; the optimizer's step has not begun."""
    model = model_of()
    optimizer: Any = wfbp.torch.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters(), schedule="wfbp"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    enter = signals.enter
    due: list[InterruptionError] = []

    def interrupted() -> bool:
        if optimizer._wfbp_sync_state is SyncState.SCALER and due:
            raise due.pop()
        return enter()

    for _ in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 24)).sum()).backward()
        if wfbp.rank() == 0:
            due.append(InterruptionError())
            signals.enter = interrupted
            with pytest.raises(InterruptionError):
                scaler.step(optimizer)
            signals.enter = enter
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.report()["steps"] == 4, optimizer.report()


def was_left(reducer: wfbp.GradientReducer) -> bool:
    assert reducer._engine is not None
    return reducer._engine.unfinished or reducer._unread is not None


def check_reducer(way: str) -> None:
    specs = [(f"t{k}", np.zeros(200 + k, np.float32)) for k in range(5)]
    reducer = wfbp.GradientReducer(specs, schedule="wfbp")
    victim.active, peers.active = wfbp.rank() == wfbp.size() - 1, True
    before = victim.count
    for step in range(steps):
        for k in range(len(specs)):
            reducer.mark_ready(k, np.full(200 + k, wfbp.rank() + step + k, np.float32))
        peers.come_late()
        found = victim.call(reducer.wait, (lambda: was_left(reducer)) if way == "go on" else None)
        if found is not None:
            for k, values in enumerate(found):
                assert np.all(values == step + k + (wfbp.size() - 1) / 2), (step, k)
    victim.active = False
    if was_left(reducer):
        reducer.wait()
    assert sum(wfbp.allgather_object(victim.count - before)) > steps / 6


def check_operations() -> None:
    victim.active, peers.active = wfbp.rank() == 0, True
    before = victim.count
    for step in range(steps):
        handles = [
            wfbp.torch.allreduce_async(
                torch.full((50,), float(wfbp.rank() + step + k)), name=f"n{k}"
            )
            for k in range(4)
        ]
        peers.come_late()
        for k, handle in enumerate(handles):
            found = victim.call(lambda handle=handle: wfbp.torch.synchronize(handle))
            assert torch.all(found == step + k + (wfbp.size() - 1) / 2), (step, k)
        group = wfbp.torch.grouped_allreduce_async(
            [torch.full((9,), float(step + k)) for k in range(3)], name="group"
        )
        for k, found in enumerate(victim.call(lambda group=group: wfbp.torch.synchronize(group))):
            assert torch.all(found == step + k)
    victim.active = False
    assert sum(wfbp.allgather_object(victim.count - before)) > steps / 6


def check_handlers_that_return() -> None:
    """They run in the midst of a wait, and may use what the program has."""
    model = model_of()
    optimizer = wfbp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), schedule="wfbp"
    )
    seen: list[float] = []

    def handle(number: int, frame: object) -> None:
        seen.append(sum(float(p.sum()) for p in model.state_dict().values()))
        MPI.COMM_WORLD.send(len(seen), 0)

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        for _ in range(5):
            model(torch.ones(2, 24)).sum().backward()
            if wfbp.rank() == 0:
                for rank in range(1, wfbp.size()):  # they wait for this one meanwhile
                    MPI.COMM_WORLD.recv(source=rank)
            else:
                signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGUSR1))
                signal.setitimer(signal.ITIMER_REAL, 0.02)
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == (5 if wfbp.rank() else 0), seen
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, previous)
        signal.signal(signal.SIGALRM, victim._handle)


CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"{way} {schedule}": lambda way=way, schedule=schedule: check_training(
            way, schedule=schedule
        )
        for way in ("again", "go on")
        for schedule in ("wfbp", "independent")
    },
    "model wfbp": lambda: check_training("model", schedule="wfbp"),
    "synchronize independent": lambda: check_training("synchronize", schedule="independent"),
    "clip independent": lambda: check_training("clip", schedule="independent"),
    "clip wfbp": lambda: check_training("clip", schedule="wfbp"),
    "scaler wfbp": lambda: check_training("scaler", schedule="wfbp"),
    "scaler left before the step": check_scaler_left_before_the_step,
    "replicated independent": lambda: check_training(
        "again", schedule="independent", optimizer_sharding=False
    ),
    "reducer again": lambda: check_reducer("again"),
    "reducer go on": lambda: check_reducer("go on"),
    "operations": check_operations,
    "handlers that return": check_handlers_that_return,
}


def main() -> None:
    global victim, peers, steps
    torch.set_num_threads(1)
    out, *rest = sys.argv[1:]
    steps = int(rest[0]) if rest else steps
    names = rest[1:] or list(CHECKS)
    wfbp.init()
    victim, peers = Victim(), Peers()
    results = {}
    for name in names:
        began = time.monotonic()
        try:
            CHECKS[name]()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
            print(name, results[name], file=sys.stderr, flush=True)
            break
        print(name, f"{time.monotonic() - began:.1f} s, {victim.count}", flush=True)
    Path(out, f"rank{wfbp.rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

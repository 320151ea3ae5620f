"""One rank gets signals whose handler raises, at random moments of what waits for the others.

The exception propagates when the call is complete. The program catches it and goes on; parameters
must be the same on all ranks, and those of a training without signals.

Usage: mpirun -n N python signals.py OUT [STEPS].
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import wfbp
import wfbp.torch
from wfbp.runtime import signals
from wfbp.torch import pending

MEAN_S = 1e-3


class InterruptionError(Exception):
    """What the handler raises."""


class Victim:
    """Sends itself signals, on one rank; ``count`` says how many have raised."""

    def __init__(self) -> None:
        self.chance = random.Random(7)
        self.active = self.armed = False
        self.count = 0
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, number: int, frame: FrameType) -> None:
        # Not before the call has begun, when it would not be carried out at all.
        postponed = frame.f_code is type(signals.deferred).__exit__.__code__
        if self.armed and postponed:
            self.armed = False
            self.count += 1
            raise InterruptionError(f"signal {number}")

    def call(self, act: Callable[[], Any]) -> Any:
        """Call it once; returns None if a handler raised at its end."""
        if self.active:
            signal.setitimer(signal.ITIMER_REAL, self.chance.expovariate(1 / MEAN_S) + 1e-6)
        self.armed = True
        try:
            return act()
        except InterruptionError:
            return None
        finally:
            self.armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


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
    draw = torch.Generator().manual_seed(wfbp.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 24, generator=draw)).square().mean().backward()
        peers.come_late()
        if way == "synchronize":
            victim.call(optimizer.synchronize)
            with optimizer.skip_synchronize():
                victim.call(optimizer.step)
        else:
            if way == "clip":
                victim.call(lambda: optimizer.clip_grad_norm_(0.1))
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
    assert not signals.pending


def check_reducer() -> None:
    specs = [(f"t{k}", np.zeros(200 + k, np.float32)) for k in range(5)]
    reducer = wfbp.GradientReducer(specs, schedule="layerwise")
    victim.active, peers.active = wfbp.rank() == wfbp.size() - 1, True
    before = victim.count
    for step in range(steps):
        for k in range(len(specs)):
            reducer.mark_ready(k, np.full(200 + k, wfbp.rank() + step + k, np.float32))
        peers.come_late()
        for k, values in enumerate(victim.call(reducer.wait) or ()):
            assert np.all(values == step + k + (wfbp.size() - 1) / 2), (step, k)
    victim.active = False
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
            if found is not None:
                assert torch.all(found == step + k + (wfbp.size() - 1) / 2), (step, k)
        group = wfbp.torch.collectives.grouped_allreduce_async(
            [torch.full((9,), float(step + k)) for k in range(3)], name="group"
        )
        found_group = victim.call(lambda group=group: wfbp.torch.synchronize(group))
        for k, found in enumerate(found_group or ()):
            assert torch.all(found == step + k)
    victim.active = False
    assert sum(wfbp.allgather_object(victim.count - before)) > steps / 6


def check_handlers_that_return() -> None:
    """They run in a long wait, once they are overdue, and may use what the program has."""
    model = model_of()
    optimizer = wfbp.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), schedule="layerwise"
    )
    seen: list[float] = []

    def handle(number: int, frame: object) -> None:
        seen.append(sum(float(p.sum()) for p in model.state_dict().values()))
        MPI.COMM_WORLD.send(len(seen), 0)

    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        for _ in range(2):
            model(torch.ones(2, 24)).sum().backward()
            if wfbp.rank() == 0:
                for rank in range(1, wfbp.size()):  # they wait for this one meanwhile
                    MPI.COMM_WORLD.recv(source=rank)
            else:
                signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGUSR1))
                signal.setitimer(signal.ITIMER_REAL, 0.02)
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == (2 if wfbp.rank() else 0), seen
        assert signal.getsignal(signal.SIGUSR1) is handle
    finally:
        signal.signal(signal.SIGUSR1, previous)
        signal.signal(signal.SIGALRM, victim._handle)


def check_handlers_that_read() -> None:
    """While this thread waits for the same parameters, which another rank has yet to update."""
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wfbp.torch.DistributedOptimizer(
        inner, model.named_parameters(), schedule="independent"
    )
    seen: list[float] = []

    def handle(number: int, frame: object) -> None:
        MPI.COMM_WORLD.send(len(seen), 0)
        seen.append(sum(float(p.detach().sum()) for p in model.parameters()))

    def come_late(*_: object) -> None:
        for rank in range(1, wfbp.size()):
            MPI.COMM_WORLD.recv(source=rank)

    signal.signal(signal.SIGALRM, handle)
    try:
        for step in range(6):
            model(torch.ones(2, 24)).sum().backward()
            if step == 5 and wfbp.rank() == 0:  # between its gradients and its update
                inner.register_step_pre_hook(come_late)
            optimizer.step()
            if step == 5 and wfbp.rank() > 0:
                assert pending.under_way
                signal.setitimer(signal.ITIMER_REAL, 0.02)
            read = sum(float(p.detach().sum()) for p in model.parameters())
            optimizer.zero_grad()
        assert seen == ([read] if wfbp.rank() else []), (seen, read)
    finally:
        signal.signal(signal.SIGALRM, victim._handle)


CHECKS: dict[str, Callable[[], None]] = {
    "step wfbp": lambda: check_training("step", schedule="layerwise"),
    "step independent": lambda: check_training("step", schedule="independent"),
    "synchronize independent": lambda: check_training("synchronize", schedule="independent"),
    "clip wfbp": lambda: check_training("clip", schedule="layerwise"),
    "reducer": check_reducer,
    "operations": check_operations,
    "handlers that return": check_handlers_that_return,
    "handlers that read": check_handlers_that_read,
}


def main() -> None:
    global victim, peers, steps
    torch.set_num_threads(1)
    out, *rest = sys.argv[1:]
    steps = int(rest[0]) if rest else steps
    names = rest[1:] or list(CHECKS)
    wfbp.init()
    victim, peers = Victim(), Peers()
    patience_s = signals.PATIENCE_S
    results = {}
    for name in names:
        began = time.monotonic()
        try:
            # On a busy machine waits take long: no handler may run before the call is complete.
            signals.PATIENCE_S = patience_s if name.startswith("handlers") else 100.0
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

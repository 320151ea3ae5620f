"""Models that are scripted, compiled, forked or freed."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import wfbp.torch as wfbp
from tests.parallel.programs.harness import Checks, raises
from tests.parallel.programs.torch.training import (
    Twins,
    data,
    equal,
    mlp,
    momentum,
    pair,
    same,
    square,
    twins,
)
from wfbp.errors import WfbpError

check = Checks()

STEPS = 8
"""Enough for every mode to install its plan and use it."""


@check.by_own_schedules
def script_modules() -> None:
    """The whole model, scripted before or after wrapping, or a part; it is read right after a
    step."""
    x = torch.ones(4, 5, dtype=torch.float64)
    for sharding, made in itertools.product((None, False), ("before", "after", "part")):
        model, reference = pair()
        trained: Any = model
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit")
            if made == "part":
                model[0] = torch.jit.script(model[0])
            elif made == "before":
                trained = torch.jit.script(model)
            optimizer = wfbp.DistributedOptimizer(
                momentum(trained.parameters()),
                schedule="independent",
                optimizer_sharding=sharding,
            )
            if made == "after":
                trained = torch.jit.script(model)
            both = Twins(trained, optimizer, reference, momentum(reference.parameters()))
            for step in range(STEPS + 2):
                both.step(step)
                with torch.no_grad():
                    same(trained(x), reference(x), f"{made}, step {step}", 1e-9)


class Jagged(nn.Module):
    """Multiplies jagged tensors, which hide their operands from other classes."""

    def __init__(self, params: list[nn.Parameter], owned: bool) -> None:
        super().__init__()
        self.weights: Any = nn.ParameterList(params) if owned else tuple(params)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return torch.as_tensor(x.values())


@check.by_own_schedules
def jagged_tensors() -> None:
    """Their weights are in a list, or belong to no module."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        rows = [data(step, rank, 2, 5), data(step + 50, rank, 3, 5)]
        model(torch.nested.nested_tensor(rows, layout=torch.jagged)).square().mean().backward()

    for sharding, owned in itertools.product((None, False), (True, False)):
        torch.manual_seed(2)
        params = [nn.Parameter(torch.randn(5, 5).double()) for _ in range(4)]
        copies = [nn.Parameter(p.detach().clone()) for p in params]
        models = Jagged(params, owned), Jagged(copies, owned)
        plain = momentum(copies)
        optimizer = wfbp.DistributedOptimizer(
            momentum(params), schedule="independent", optimizer_sharding=sharding
        )
        for step in range(STEPS):
            for each in (optimizer, plain):
                each.zero_grad()
            backward(models[0], wfbp.rank(), step)
            for rank in range(wfbp.size()):
                backward(models[1], rank, step)
            for q in copies:
                assert q.grad is not None
                q.grad.div_(wfbp.size())
            for each in (optimizer, plain):
                each.step()
            if step % 3 == 2:
                equal(params, copies, f"owned: {owned}, step {step}")


@check.by_own_schedules
def operations_in_compiled_code() -> None:
    """They are left out of graphs: other shapes and later calls compile nothing anew."""
    graphs: list[object] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, dynamic=True)
    def total(x: torch.Tensor) -> torch.Tensor:
        handle = wfbp.allreduce_async(x * 2, op=wfbp.Sum)
        return torch.as_tensor(wfbp.synchronize(handle) + wfbp.broadcast(torch.ones_like(x), 0))

    torch._dynamo.reset()
    ranks = range(wfbp.size())
    for step in range(6):
        wanted = sum(2 * data(step, r, 3 + step, 5) for r in ranks) + 1
        same(total(data(step, wfbp.rank(), 3 + step, 5)), torch.as_tensor(wanted), "sum", 1e-12)
    assert len(graphs) <= 6, f"{len(graphs)} graphs of one function"

    torch.manual_seed(4)
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.BatchNorm1d(6)]
    model = nn.Sequential(*layers, nn.Linear(6, 1)).double()
    reference = copy.deepcopy(model)
    model = wfbp.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[assignment]
    optimizer = wfbp.DistributedOptimizer(momentum(model.parameters()), schedule="independent")
    plain = momentum(reference.parameters())
    compiled: Any = torch.compile(model, backend=count, dynamic=True)
    for step in range(STEPS):
        rows = 4 + step % 3
        optimizer.zero_grad()
        plain.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*global hooks")  # of earlier optimizers
            compiled(data(step, wfbp.rank(), rows, 5)).square().mean().backward()
        reference(torch.cat([data(step, r, rows, 5) for r in ranks])).square().mean().backward()
        optimizer.step()
        plain.step()
        if step == 3:
            graphs.clear()
    equal(model.parameters(), reference.parameters())
    assert not graphs, f"{len(graphs)} graphs after the fourth step"
    torch._dynamo.reset()


def forked(act: Callable[[], None]) -> None:
    """Run in a forked process, which must succeed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        code = 1
        try:
            act()
            code = 0
        except BaseException as error:
            print(f"forked process: {type(error).__name__}: {error}", flush=True)
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, "the forked process failed"


@check
def forked_processes() -> None:
    """They train a copy: neither this rank nor a process between both sees what they write."""
    both = twins()
    model, optimizer = both[:2]
    results = [wfbp.allreduce(torch.ones(5000)), wfbp.allgather(torch.ones(5000))]

    def seen() -> list[torch.Tensor]:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [t.detach().clone() for t in (*grads, *model.parameters(), *results)]

    def unchanged(before: list[torch.Tensor], where: str) -> None:
        for k, (now, then) in enumerate(zip(seen(), before, strict=True)):
            same(now, then, f"{where}: tensor {k}")

    def child() -> None:
        for step in range(2):
            square(model, wfbp.rank(), step)
        mine = momentum(copy.deepcopy(model).parameters())
        mine.step()
        with torch.no_grad():
            for tensor in (*model.parameters(), *results):
                tensor.add_(1.0)
        before = seen()
        forked(grandchild)
        unchanged(before, "forked process")
        raises(WfbpError, "only its parent can communicate", act=optimizer.step)
        raises(WfbpError, "only its parent can communicate", act=lambda: wfbp.allreduce(results[0]))

    def grandchild() -> None:
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = None
        square(model, wfbp.rank(), 7)
        results[0].zero_()

    for step in range(STEPS):
        both.step(step)
        if step % 3 == 1:
            before = seen()
            forked(child)
            unchanged(before, "rank")
    both.equal()


@check
def a_dropped_model_is_freed() -> None:
    """When the next optimizer is made, though its parameters were still under way."""

    def train() -> weakref.ref[torch.Tensor]:
        model = mlp(5, 7, 7, 3)
        wfbp.broadcast_parameters(model.state_dict())
        optimizer = wfbp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        for step in range(STEPS):
            optimizer.zero_grad()
            square(model, wfbp.rank(), step)
            optimizer.step()
        return weakref.ref(model[-1].weight)

    first = train()
    for _ in range(2):
        train()
    deadline_s = time.monotonic() + 10.0
    while first() is not None:  # the communication thread has to drop it, too
        assert time.monotonic() < deadline_s, "the model is still in memory"
        time.sleep(0.01)
        gc.collect()


@check
def shown_process_set() -> None:
    """``repr()`` of a set that was not added sends nothing."""
    known = wfbp.ProcessSet(range(wfbp.size()))
    shown: list[str] = []
    thread = threading.Thread(target=lambda: shown.append(repr(known)), daemon=True)
    if wfbp.rank() == 0:
        thread.start()
        thread.join(2.0)
    hangs = MPI.COMM_WORLD.bcast(thread.is_alive())
    if hangs and wfbp.rank() > 0:
        repr(known)  # so that rank 0 goes on
    if wfbp.rank() == 0:
        thread.join(20.0)
    assert not hangs, "repr() on rank 0 alone waits for the other ranks"
    assert known.ranks == list(range(wfbp.size()))

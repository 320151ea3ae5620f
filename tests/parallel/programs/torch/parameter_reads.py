"""Parameters read right after a step, from lists and threads, under every decoupled schedule.

``parameter_reads.py OUT`` under mpirun. Two equal models are trained side by side; one
is read at once by all means, the other one when its parameters have been synchronized. They are
compared bit by bit.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import json
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import wfbp.torch as wfbp
from tests.parallel.programs.harness import mixed
from wfbp.config import Config
from wfbp.runtime.tuning import tuner

WIDTH = 300
SCHEDULES = ("independent", "hybrid", "ipart", "ps", "auto")
"""Every one is a name of the test."""

List = list[torch.Tensor]


class Memory(torch.autograd.Function):
    """Reads a tensor where it lies, as C++ extensions do."""

    @staticmethod
    def forward(ctx: Any, held: torch.Tensor, address: int) -> torch.Tensor:
        values = (ctypes.c_float * held.numel()).from_address(address)
        return torch.from_numpy(np.frombuffer(values, np.float32).copy())


def average(params: List, kept: List) -> List:
    for mean, p in zip(kept, params, strict=True):
        mean.lerp_(p.detach(), 0.1)
    return [mean.clone() for mean in kept]


def in_modes(params: List) -> List:
    with torch.inference_mode(), torch.device("meta"), FlopCounterMode(display=False):
        return [p.detach().clone() for p in params]


def transformed(params: List) -> List:
    ones = [torch.ones(p.shape) for p in params]
    rows = zip(params, ones, strict=True)
    return [torch.func.grad(lambda q, p=p: (q * p).sum())(one) for p, one in rows]


def constructed(params: List) -> List:
    """By constructors, which ask no class."""
    first, second, *others = params
    places = torch.arange(second.numel())[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of PyTorch, which would clone them
        made = [
            torch.tensor(first),
            torch.ones(1).new_tensor(others[0]),
            nn.Parameter(others[1]).detach().clone(),
            torch.sparse_coo_tensor(places, second, second.shape).to_dense().detach(),
        ]
    return made + [torch.Tensor._make_subclass(torch.Tensor, p).clone() for p in others[2:]]


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2.0


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit")
    doubled = torch.jit.script(double)


READS: list[Callable[[List, nn.Module, List], Any]] = [
    lambda params, model, kept: [p.detach().clone() for p in params],
    lambda params, model, kept: [p.data.clone() for p in reversed(params)],
    lambda params, model, kept: average(params, kept),
    lambda params, model, kept: torch._foreach_norm([p.detach() for p in params]),
    lambda params, model, kept: [torch.from_numpy(p.detach().numpy().copy()) for p in params],
    lambda params, model, kept: nn.utils.parameters_to_vector(params).detach().clone(),
    lambda params, model, kept: list(copy.deepcopy(model).parameters()),
    lambda params, model, kept: [v.clone() for v in model.state_dict().values()],
    lambda params, model, kept: [torch.func.grad(lambda q: (q * q).sum())(p) for p in params],
    lambda params, model, kept: transformed(params),
    lambda params, model, kept: in_modes(params),
    lambda params, model, kept: constructed(params),
    lambda params, model, kept: [doubled(p).detach() for p in params],
    lambda params, model, kept: [p.as_subclass(torch.Tensor).detach().clone() for p in params],
    lambda params, model, kept: [Memory.apply(p, a) for p, a in zip(params, kept[0], strict=True)],  # type: ignore[no-untyped-call]
]


STEPS = len(READS)


class Side:
    """A model and its optimizer."""

    def __init__(self, schedule: str) -> None:
        torch.manual_seed(5)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        self.model = nn.Sequential(*layers)
        self.params: Any = list(self.model.parameters())
        self.means = [p.detach().clone() for p in self.params]
        self.addresses: Any = [[p.data_ptr() for p in self.params]]
        self.optimizer = wfbp.DistributedOptimizer(
            torch.optim.SGD(self.params, lr=0.5, momentum=0.9),
            self.model.named_parameters(),
            schedule=schedule,
        )

    def backward(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + wfbp.rank())
        x = torch.randn(4, WIDTH, generator=generator)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()

    def read(self, step: int) -> Any:
        number = step % len(READS)
        kept = self.addresses if number == len(READS) - 1 else self.means
        return READS[number](self.params, self.model, kept)


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(equal, found, wanted))
    return torch.equal(found, wanted)


def one_after_another(schedule: str) -> list[str]:
    """Every way of reading, and views that were made before."""
    wrong = []
    one, other = Side(schedule), Side(schedule)
    for step in range(STEPS):
        one.backward(step)
        one.optimizer.step()
        found = one.read(step)
        other.backward(step)
        other.optimizer.step()
        other.optimizer.synchronize_parameters()
        if not equal(found, other.read(step)):
            wrong.append(f"step {step}: read {step % len(READS)}")
    views = [p.detach().view(-1) for p in one.params[::2]]
    for step in range(STEPS, STEPS + 3):
        one.backward(step)
        one.optimizer.step()
        seen = [view.clone() for view in views]
        other.backward(step)
        other.optimizer.step()
        other.optimizer.synchronize_parameters()
        if not equal(seen, [p.detach().view(-1) for p in other.params[::2]]):
            wrong.append(f"step {step}: views")
    return wrong


def by_other_threads(schedule: str) -> list[str]:
    """One thread reads between steps, under the program's lock; two read whenever they like."""
    wrong: list[str] = []
    one, other = Side(schedule), Side(schedule)
    lock, done, history = threading.Lock(), [0], [[p.detach().clone() for p in one.params]]
    taken: list[tuple[int, List]] = []
    end = threading.Event()

    def between_steps() -> None:
        while not end.is_set():
            with lock:
                taken.append((done[0], [p.detach().clone() for p in one.params]))
            time.sleep(2e-3)

    def at_any_time() -> None:
        while not end.is_set():
            state = {k: v.clone() for k, v in one.model.state_dict().items()}
            assert len(state) == len(one.params)
            nn.utils.parameters_to_vector(one.params)
            time.sleep(1e-3)

    def guarded(read: Callable[[], None]) -> None:
        try:
            read()
        except BaseException as error:
            wrong.append(f"{read.__name__}: {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=functools.partial(guarded, read))
        for read in (between_steps, at_any_time, at_any_time)
    ]
    for thread in threads:
        thread.start()
    try:
        for step in range(STEPS):
            one.backward(step)
            with lock:
                one.optimizer.step()
                done[0] += 1
            other.backward(step)
            other.optimizer.step()
            other.optimizer.synchronize_parameters()
            history.append([p.detach().clone() for p in other.params])
    finally:
        end.set()
        for thread in threads:
            thread.join(30.0)
    numbers = {number for number, values in taken if not equal(values, history[number])}
    return wrong + [f"after step {number}: another thread" for number in sorted(numbers)]


def main() -> None:
    tuner.fixed_candidates = mixed  # hybrids decouple every other tensor, whatever that costs
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    config = Config(
        shared_memory=False,
        warmup_steps=1,
        profile_steps=1,
        trial_steps=1,
        probe_budget_s=0.05,
        timeout_s=60.0,
    )
    wfbp.init(config=config)
    results = {}
    for schedule in SCHEDULES:
        wrong = one_after_another(schedule)
        if schedule in ("independent", "auto"):
            wrong += by_other_threads(schedule)
        results[schedule] = wrong
    Path(sys.argv[1], f"rank{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""Whole training iterations of wfbp, PyTorch DDP and plain MPI, on this job's ranks.

All contestants start from the same state and must reach the same parameters before anything is
timed. Then each runs one block of iterations per round, in an order shuffled every round, so that
foreign load affects all. A time is the mean of all ranks' times.
"""

from __future__ import annotations

import random
import re
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import wfbp.torch

Batch = tuple[Any, ...]
Make = Callable[[], tuple[nn.Module, Callable[[int], Batch]]]
"""Makes a model, whose ``model(*batch)`` is the loss, and a function from a seed to a batch."""

NUM_BATCHES = 4
NUM_STEPS = 3
"""Steps after which parameters are compared."""
LEARNING_RATE = 0.01
TIMED_RATE = 1e-6
"""Learning rate of timed steps: many steps on few batches must not diverge."""
TOLERANCE = 1e-4
"""Relative to the norm of the parameters' change."""
MOST_WARM_UP_STEPS = 2000
BLOCK_S = 0.5


class _WithLoss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.body(x).square().mean()
        return loss


def mlp() -> tuple[nn.Module, Callable[[int], Batch]]:
    """60 linear layers of 256: many small tensors."""
    layers = [part for _ in range(60) for part in (nn.Linear(256, 256), nn.ReLU())]
    return _WithLoss(nn.Sequential(*layers)), lambda seed: (_random(seed, 64, 256),)


def transformer() -> tuple[nn.Module, Callable[[int], Batch]]:
    """Six encoder layers of width 512: tensors of mixed size, 19 million elements."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return _WithLoss(body), lambda seed: (_random(seed, 4, 64, 512),)


MODELS: dict[str, Make] = {"mlp": mlp, "transformer": transformer}


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def model_named(text: str) -> Make:
    """A model of :data:`MODELS`, or of a program, ``module:function``; else ``ValueError``."""
    if text in MODELS:
        return MODELS[text]
    module, _, name = text.partition(":")
    if not name:
        raise ValueError(f"model {text!r}: expected {', '.join(MODELS)} or MODULE:FUNCTION")
    try:
        made: Make = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"model {text!r}: {error}") from error
    return made


@dataclass(slots=True)
class Contestant:
    """One copy of the model with one way to exchange its gradients.

    ``exchange`` runs between backward and step; ``phase`` returns "installed" once it has chosen
    how to communicate.
    """

    name: str
    model: nn.Module
    sgd: torch.optim.SGD
    module: nn.Module
    optimizer: Any
    exchange: Callable[[], None] = lambda: None
    phase: Callable[[], str] = lambda: "installed"
    seconds: list[float] = field(default_factory=list)
    """Per iteration, one number per block."""

    def step(self, batch: Batch) -> None:
        """One training iteration."""
        self.optimizer.zero_grad()
        self.module(*batch).backward()
        self.exchange()
        self.optimizer.step()

    def reset(self, state: dict[str, Any], learning_rate: float) -> None:
        """Load a model state, without momentum."""
        self.model.load_state_dict(state)
        self.sgd.state.clear()
        for group in self.sgd.param_groups:
            group["lr"] = learning_rate

    def finish(self) -> None:
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():  # reading a parameter waits for its values
            parameter.detach()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()


def alone(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """No communication: a lower bound for the others."""
    return Contestant(name, model, sgd, model, sgd)


def flat_mpi(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """One blocking all-reduce of all gradients in one buffer in host memory, after backward."""
    parameters = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters))
    parts = [
        part.view_as(p)
        for part, p in zip(
            torch.split(flat, [p.numel() for p in parameters]), parameters, strict=True
        )
    ]

    def exchange() -> None:
        gradients = [p.grad for p in parameters]
        for part, gradient in zip(parts, gradients, strict=True):
            part.zero_() if gradient is None else part.copy_(gradient)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat.div_(MPI.COMM_WORLD.size)
        for part, gradient in zip(parts, gradients, strict=True):
            if gradient is not None:
                gradient.copy_(part)

    return Contestant(name, model, sgd, model, sgd, exchange)


def ddp(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """PyTorch's DistributedDataParallel; its default buckets, or those of ``ddp-MIB``."""
    mib = name.partition("-")[2]
    options: dict[str, Any] = {"bucket_cap_mb": float(mib)} if mib else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # an option's name depends on the version
        module = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, **options)
    return Contestant(name, model, sgd, module, sgd)


def ours(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """wfbp, with the schedule after the dash."""
    optimizer = wfbp.torch.DistributedOptimizer(
        sgd, named_parameters=model.named_parameters(), schedule=name.partition("-")[2]
    )
    return Contestant(
        name, model, sgd, model, optimizer, phase=lambda: str(optimizer.report()["phase"])
    )


BEST_DDP = "ddp-best"
BUCKETS = ("ddp-1", "ddp-5", "ddp-25", "ddp-100")
"""``ddp-best`` is the fastest of these sizes in MiB in a trial before the rounds."""
TRIAL_BLOCKS = 3
CONTESTANTS = {"none": alone, "mpi-flat": flat_mpi, "ddp": ddp, BEST_DDP: ddp, "wfbp-auto": ours}
"""The contestants; ``wfbp-SCHEDULE`` and ``ddp-MIB`` are possible, too."""
REFERENCE = "mpi-flat"


def maker(name: str) -> Callable[[str, nn.Module, torch.optim.SGD], Contestant]:
    """The function that makes a contestant of this name; ``ValueError`` if there is none."""
    if name.startswith("wfbp-"):
        return ours
    if name in CONTESTANTS:
        return CONTESTANTS[name]
    if re.fullmatch(r"ddp-\d+(\.\d+)?", name):
        return ddp
    known = ", ".join(CONTESTANTS)
    raise ValueError(f"contestant {name!r}: expected {known}, wfbp-SCHEDULE or ddp-MIB")


def run(
    make: Make, names: Sequence[str], rounds: int, device: str, say: Callable[[str], None]
) -> list[Contestant]:
    """Time contestants in blocks; collective. ``RuntimeError`` if models differ, or no plan."""
    world = MPI.COMM_WORLD
    wfbp.torch.init()
    if device == "cuda":
        torch.cuda.set_device(wfbp.torch.local_rank())
    tried = BUCKETS if BEST_DDP in names else ()
    names = [name for name in dict.fromkeys([*names, REFERENCE, *tried]) if name != BEST_DDP]
    with_ddp = any(maker(name) is ddp for name in names)
    if with_ddp:
        _start_ddp(device)
    contestants = []
    for name in names:
        torch.manual_seed(0)
        model, batch_of = make()
        model.to(device)
        sgd = torch.optim.SGD(model.parameters(), lr=TIMED_RATE, momentum=0.9)
        contestants.append(maker(name)(name, model, sgd))
    batches = [
        tuple(t.to(device) if isinstance(t, torch.Tensor) else t for t in batch_of(seed))
        for seed in range(NUM_BATCHES * world.rank, NUM_BATCHES * (world.rank + 1))
    ]
    state = {k: v.clone() for k, v in contestants[0].model.state_dict().items()}
    for contestant in contestants:
        contestant.reset(state, TIMED_RATE)
        steps = _warm_up(contestant, batches)
        say(f"{contestant.name}: ready after {steps} steps")
    _compare(contestants, state, batches)
    length = max(2, round(BLOCK_S / _time(contestants[0], batches, 2)))
    length = world.bcast(length)
    for contestant in contestants:
        contestant.reset(state, TIMED_RATE)
    if tried:
        buckets = [c for c in contestants if c.name in tried]
        trial_s: dict[str, list[float]] = {name: [] for name in tried}
        for _ in range(TRIAL_BLOCKS):
            for c in buckets:
                trial_s[c.name].append(_time(c, batches, max(2, length // 4)))
        best = min(tried, key=lambda name: statistics.median(trial_s[name]))
        say(f"DDP is fastest with buckets of {best.removeprefix('ddp-')} MiB")
        contestants = [c for c in contestants if c.name == best or c.name not in tried]
    order, shuffle = list(contestants), random.Random(0).shuffle  # the same on every rank
    for number in range(rounds):
        shuffle(order)
        for contestant in order:
            _time(contestant, batches, max(1, length // 10))  # brings its data back
            contestant.seconds.append(_time(contestant, batches, length))
            contestant.finish()
        say(f"round {number + 1} of {rounds}: {length} iterations each")
    if with_ddp:
        torch.distributed.destroy_process_group()
    wfbp.torch.shutdown()
    return contestants


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0], seconds[0]
    first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return first, middle, third


def _start_ddp(device: str) -> None:
    world = MPI.COMM_WORLD
    make_store = torch.distributed.TCPStore  # type: ignore[attr-defined]
    if world.rank == 0:
        store = make_store(_own_address(), 0, is_master=True, wait_for_workers=False)
        world.bcast((store.host, store.port))
    else:
        store = make_store(*world.bcast(None))
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=world.rank, world_size=world.size
    )


def _own_address() -> str:
    """This host's address for ranks on other hosts."""
    if wfbp.torch.local_size() == wfbp.torch.size():
        return "127.0.0.1"
    return socket.gethostbyname(socket.gethostname())


def _warm_up(contestant: Contestant, batches: Sequence[Batch]) -> int:
    """Step until the contestant has chosen how to communicate, on every rank."""
    steps = 0
    while steps < NUM_STEPS or not MPI.COMM_WORLD.allreduce(
        contestant.phase() == "installed", MPI.LAND
    ):
        if steps >= MOST_WARM_UP_STEPS:
            raise RuntimeError(f"{contestant.name} has no plan after {steps} steps")
        contestant.step(batches[steps % len(batches)])
        steps += 1
    contestant.finish()
    return steps


def _compare(
    contestants: Sequence[Contestant], state: dict[str, Any], batches: Sequence[Batch]
) -> None:
    def trained(contestant: Contestant) -> torch.Tensor:
        contestant.reset(state, LEARNING_RATE)
        for number in range(NUM_STEPS):
            contestant.step(batches[number % len(batches)])
        contestant.finish()
        return torch.cat([p.detach().flatten().cpu() for p in contestant.model.parameters()])

    (reference,) = (c for c in contestants if c.name == REFERENCE)
    wanted = trained(reference)
    reference.reset(state, LEARNING_RATE)
    start = torch.cat([p.detach().flatten().cpu() for p in reference.model.parameters()])
    for contestant in contestants:
        if contestant.name == "none":
            continue
        change = float((trained(contestant) - wanted).norm() / (wanted - start).norm())
        worst: float = MPI.COMM_WORLD.allreduce(change, MPI.MAX)
        if not worst <= TOLERANCE:  # written so that no number fails
            raise RuntimeError(
                f"{contestant.name} trains something else than {REFERENCE}: after {NUM_STEPS} "
                f"steps parameters differ by {worst:.1e} of their change, expected at most "
                f"{TOLERANCE:.0e}. Does the model draw random numbers, as by dropout?"
            )


def _time(contestant: Contestant, batches: Sequence[Batch], count: int) -> float:
    """Seconds per iteration, the mean of all ranks."""
    MPI.COMM_WORLD.Barrier()
    start = time.perf_counter()
    for number in range(count):
        contestant.step(batches[number % len(batches)])
    if next(contestant.model.parameters()).is_cuda:
        torch.cuda.synchronize()
    took_s: float = MPI.COMM_WORLD.allreduce(time.perf_counter() - start)
    return took_s / MPI.COMM_WORLD.size / count

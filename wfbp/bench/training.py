"""Whole training iterations of wfbp, PyTorch DDP, Horovod and plain MPI, on this job's ranks.

All contestants start from the same state and must reach the same parameters before anything is
timed. Then each runs one block of iterations per round, in an order shuffled every round, so that
foreign load affects all. A time is the mean of all ranks' times.
"""

from __future__ import annotations

import platform
import random
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import wfbp.torch
import wfbp.torch.distributed
from wfbp.core.ranks import counted
from wfbp.runtime.runtime import FORWARDING_S

Batch = tuple[Any, ...]
Make = Callable[[], tuple[nn.Module, Callable[[int], Batch]]]
"""Makes a model, whose ``model(*batch)`` is the loss, and a function from a seed to a batch."""

NUM_BATCHES = 4
NUM_STEPS = 3
"""Steps after which parameters are compared, on two ranks. On more, contestants add up in different
orders, which deep models amplify from step to step: one step is compared."""
LEARNING_RATE = 0.01
TIMED_RATE = 1e-6
"""Learning rate of timed steps: many steps on few batches must not diverge."""
TOLERANCE = 1e-4
"""Relative to the norm of the parameters' change."""
TOLERANCES = {"none": TOLERANCE, "fp16": 0.02, "bf16": 0.02, "int8": 0.1}
TOLERANCES |= {"fp8": 0.2, "int4": 0.5}
TOLERANCES |= {f"auto:{name}": TOLERANCES[name] for name in ("bf16", "int8", "int4")}
"""Of wfbp's contestants, by how they send gradients; rounding adds up, so one step is compared."""
MOST_WARM_UP_STEPS = 2000
BLOCK_S = 0.5
START_S = 30.0
"""DDP starts within this time, or not at all."""


def mlp() -> tuple[nn.Module, Callable[[int], Batch]]:
    """60 linear layers of 256: many small tensors."""
    layers = [part for _ in range(60) for part in (nn.Linear(256, 256), nn.ReLU())]
    return _task(nn.Sequential(*layers), 64, 256)


def transformer() -> tuple[nn.Module, Callable[[int], Batch]]:
    """Six encoder layers of width 512: tensors of mixed size, 19 million elements."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return _task(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), 4, 64, 512)


def _task(body: nn.Module, *shape: int) -> tuple[nn.Module, Callable[[int], Batch]]:
    """The model with a loss, and batches of this shape."""
    body.register_forward_hook(lambda module, inputs, output: output.square().mean())
    return body, lambda seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)),)


MODELS: dict[str, Make] = {"mlp": mlp, "transformer": transformer}


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

    ``exchange`` runs between backward and step, ``begin`` before each step, ``end`` after a block.
    """

    name: str
    model: nn.Module
    sgd: torch.optim.SGD
    module: nn.Module
    optimizer: Any
    exchange: Callable[[], None] = lambda: None
    begin: Callable[[], object] = lambda: None
    end: Callable[[], object] = lambda: None
    compression: str = "none"
    seconds: list[float] = field(default_factory=list)
    """Per iteration, one number per block; so are the next."""
    cpu_seconds: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    """wfbp's own, after the last round: the plan and its prediction."""

    @property
    def plans(self) -> bool:
        """Whether it is one of wfbp's optimizers."""
        return isinstance(self.optimizer, wfbp.torch.DistributedOptimizerBase)

    def step(self, batch: Batch) -> None:
        """One training iteration."""
        self.begin()
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
        self.end()


BEST_DDP = "ddp-best"
BUCKETS = ("ddp-1", "ddp-5", "ddp-100")
"""``ddp-best`` is the fastest of these sizes in MiB in a trial before the rounds."""
TRIALS = 3
REFERENCE = "mpi-per-tensor"
FLAT = "mpi-flat"
_NAMES = re.compile(rf"none|{REFERENCE}|{FLAT}|horovod|wfbp-.*|ddp|{BEST_DDP}|ddp-\d+(\.\d+)?")


def check_contestant(name: str) -> None:
    """Raise ``ValueError`` if there is no contestant of this name."""
    if not _NAMES.fullmatch(name):
        raise ValueError(
            f"contestant {name!r}: expected none, {REFERENCE}, {FLAT}, ddp, {BEST_DDP}, horovod, "
            "wfbp-auto, wfbp-SCHEDULE, wfbp-SCHEDULE/COMPRESSION or ddp-MIB"
        )
    if name == "horovod" and find_spec("horovod") is None:
        raise ValueError("contestant 'horovod': Horovod is not installed")


def make_contestant(
    name: str, model: nn.Module, sgd: torch.optim.SGD, compression: str = "none"
) -> Contestant:
    """A copy of the model that trains as the name tells; collective.

    ``compression`` is how wfbp sends gradients, unless a name ends otherwise, as in
    ``wfbp-auto/int8``; all others send them as they are.
    """
    made = Contestant(name, model, sgd, model, sgd)
    kind, _, choice = name.partition("-")
    if name == REFERENCE:
        made.exchange = partial(_reduce_each, model)
    elif name == FLAT:
        made.exchange = partial(_reduce_at_once, model)
    elif kind == "ddp":
        made.module = _ddp(model, choice)
    elif kind == "horovod":  # stopped while others run, since it keeps a core busy
        import horovod.torch as hvd

        hvd.init()
        made.optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        made.sgd = made.optimizer  # a copy: it does not share the state
        made.begin, made.end = lambda: hvd.is_initialized() or hvd.init(), hvd.shutdown
        made.end()  # others warm up first, and choose their plans
    elif kind == "wfbp":
        schedule, _, own = choice.partition("/")
        made.compression = own or compression
        made.optimizer = wfbp.torch.DistributedOptimizer(
            sgd,
            named_parameters=model.named_parameters(),
            schedule=schedule,
            compression=made.compression,
        )
    return made


def _reduce_each(model: nn.Module) -> None:
    """One blocking all-reduce per tensor, in host memory."""
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        host = p.grad.to("cpu", torch.float32).contiguous()  # the gradient itself, if possible
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, host.numpy())
        p.grad.copy_(host.div_(MPI.COMM_WORLD.size))


def _reduce_at_once(model: nn.Module) -> None:
    """One blocking all-reduce of all gradients, in host memory."""
    for p in filter(lambda p: p.requires_grad and p.grad is None, model.parameters()):
        p.grad = torch.zeros_like(p)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    host = torch.cat([grad.flatten() for grad in grads]).to("cpu", torch.float32)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, host.numpy())
    for grad, average in zip(grads, torch.split(host, [g.numel() for g in grads]), strict=True):
        grad.copy_(average.view_as(grad).div_(MPI.COMM_WORLD.size))


def _ddp(model: nn.Module, mib: str) -> nn.Module:
    """PyTorch's DistributedDataParallel, with its default buckets or those of so many MiB."""
    options: dict[str, Any] = {"bucket_cap_mb": float(mib)} if mib else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # an option's name depends on the version
        return nn.parallel.DistributedDataParallel(
            model,
            broadcast_buffers=False,
            process_group=torch.distributed.new_group(),  # with PyTorch's own timeout
            **options,
        )


def run_or_abort(
    make: Make, names: Sequence[str], rounds: int, device: str, compression: str = "none"
) -> list[Contestant] | None:
    """As :func:`run` on rank 0, None elsewhere; if one rank fails, all exit."""
    if MPI.COMM_WORLD.size == 1:
        raise ValueError(
            "a benchmark needs at least two ranks; start it as: mpirun -np N wfbp bench ..."
        )
    try:
        results = run(make, names, rounds, device, compression)
    except Exception as error:
        message = f"wfbp bench: error: rank {MPI.COMM_WORLD.rank}: {error}"
        print(message, file=sys.stderr, flush=True)
        time.sleep(FORWARDING_S)
        MPI.COMM_WORLD.Abort(1)
        raise
    return results if MPI.COMM_WORLD.rank == 0 else None


def machine() -> dict[str, Any]:
    """Command, ranks, machine and versions, which affect the results."""
    versions = {}
    for package in ("wfbp", "torch", "numpy", "mpi4py"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": sys.argv[1:],
        "ranks": MPI.COMM_WORLD.size,
        "mpi": MPI.Get_library_version().split("\n")[0].strip(" \0"),
        "machine": platform.platform(),
        "versions": versions,
    }


def _say(text: str) -> None:
    if MPI.COMM_WORLD.rank == 0:
        print(text, file=sys.stderr, flush=True)


def run(
    make: Make, names: Sequence[str], rounds: int, device: str, compression: str = "none"
) -> list[Contestant]:
    """Time contestants in blocks; collective. ``RuntimeError`` if models differ, or no plan."""
    wfbp.torch.init()
    if device == "cuda":
        torch.cuda.set_device(wfbp.torch.local_rank())
    tried = BUCKETS if BEST_DDP in names else ()
    names = [name for name in dict.fromkeys([*names, REFERENCE, *tried]) if name != BEST_DDP]
    if with_ddp := any(name.startswith("ddp") for name in names):
        torch.distributed.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method="wfbp://",
            timeout=timedelta(seconds=START_S),
        )
    contestants, batches = _make(make, names, device, compression)
    state = {k: v.clone() for k, v in contestants[0].model.state_dict().items()}
    for contestant in contestants:
        contestant.reset(state, TIMED_RATE)
        _say(f"{contestant.name}: ready after {counted(_warm_up(contestant, batches), 'step')}")
    reference = next(c for c in contestants if c.name == REFERENCE)
    _compare(contestants, reference, state, batches)
    for contestant in contestants:
        contestant.reset(state, TIMED_RATE)
    length = max(2, round(BLOCK_S / _time(reference, batches, 2)[0]))
    buckets = [c for c in contestants if c.name in tried]
    trial_s = [[_time(c, batches, max(2, length // 4))[0] for c in buckets] for _ in range(TRIALS)]
    if buckets:
        medians = [statistics.median(times) for times in zip(*trial_s, strict=True)]
        best = buckets.pop(medians.index(min(medians)))
        _say(f"DDP is fastest with buckets of {best.name.removeprefix('ddp-')} MiB")
    contestants = [c for c in contestants if c not in buckets]
    order, shuffle = list(contestants), random.Random(0).shuffle  # the same on every rank
    for number in range(rounds):
        shuffle(order)
        for contestant in order:
            _time(contestant, batches, max(1, length // 10))  # brings its data back
            seconds, cpu_seconds = _time(contestant, batches, length)
            contestant.seconds.append(seconds)
            contestant.cpu_seconds.append(cpu_seconds)
            contestant.finish()
        _say(f"round {number + 1} of {rounds}: {length} iterations each")
    for contestant in filter(lambda c: c.plans, contestants):
        contestant.report = contestant.optimizer.report()
    if with_ddp:
        torch.distributed.destroy_process_group()
    wfbp.torch.shutdown()
    return contestants


def _make(
    make: Make, names: Sequence[str], device: str, compression: str
) -> tuple[list[Contestant], list[Batch]]:
    """Contestants with equal models, and this rank's batches."""
    contestants = []
    for name in names:
        torch.manual_seed(0)
        model, batch_of = make()
        model.to(device)
        sgd = torch.optim.SGD(model.parameters(), lr=TIMED_RATE, momentum=0.9)
        contestants.append(make_contestant(name, model, sgd, compression))
    first = NUM_BATCHES * MPI.COMM_WORLD.rank
    batches = [
        tuple(t.to(device) if isinstance(t, torch.Tensor) else t for t in batch_of(seed))
        for seed in range(first, first + NUM_BATCHES)
    ]
    return contestants, batches


def _warm_up(contestant: Contestant, batches: Sequence[Batch]) -> int:
    """Step until the contestant has chosen how to communicate, on every rank."""
    for steps in range(1, MOST_WARM_UP_STEPS + 1):
        contestant.step(batches[steps % len(batches)])
        ready = not contestant.plans or contestant.optimizer.report()["phase"] == "installed"
        if MPI.COMM_WORLD.allreduce(ready, MPI.LAND):
            contestant.finish()
            return steps
    raise RuntimeError(f"{contestant.name} has no plan after {MOST_WARM_UP_STEPS} steps")


def _compare(
    contestants: Sequence[Contestant],
    reference: Contestant,
    state: dict[str, Any],
    batches: Sequence[Batch],
) -> None:
    """Raise ``RuntimeError`` unless all that communicate reach the reference's parameters."""

    exact = {c.compression for c in contestants} == {"none"} and MPI.COMM_WORLD.Get_size() <= 2
    most_steps = NUM_STEPS if exact else 1

    def trained(contestant: Contestant, num_steps: int = most_steps) -> torch.Tensor:
        contestant.reset(state, LEARNING_RATE)
        for number in range(num_steps):
            contestant.step(batches[number % len(batches)])
        contestant.finish()
        return torch.cat([p.detach().flatten().cpu() for p in contestant.model.parameters()])

    start, wanted = trained(reference, 0), trained(reference)
    for contestant in contestants:
        if contestant.name == "none":
            continue
        change = float((trained(contestant) - wanted).norm() / (wanted - start).norm())
        worst: float = MPI.COMM_WORLD.allreduce(change, MPI.MAX)
        tolerance = TOLERANCES[contestant.compression]
        if not worst <= tolerance:  # written so that no number fails
            raise RuntimeError(
                f"{contestant.name} trains something else than {REFERENCE}: after "
                f"{counted(most_steps, 'step')} parameters differ by {worst:.1e} of their change, "
                f"expected at most {tolerance:.0e}. Does the model draw random numbers, as by "
                "dropout?"
            )


def _time(contestant: Contestant, batches: Sequence[Batch], count: int) -> tuple[float, float]:
    """Seconds and CPU seconds per iteration, means of all ranks."""
    MPI.COMM_WORLD.Barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    for number in range(count):
        contestant.step(batches[number % len(batches)])
    if next(contestant.model.parameters()).is_cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - start, time.process_time() - start_cpu
    sums = (MPI.COMM_WORLD.allreduce(each) for each in took)
    seconds, cpu_seconds = (each / MPI.COMM_WORLD.size / count for each in sums)
    return seconds, cpu_seconds

"""The contestants of the training benchmark: each exchanges gradients in its own way.

All run the same loop (forward, backward, exchange, update) in the same processes; a contestant
is what it wraps around the model, what it does between backward and the update, or the optimizer
it puts in place of the plain one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from wfbp.bench.models import Batch, loss

SCHEDULES = ("auto", "oasr", "mgwfbp", "wfbp", "single", "threshold", "hybrid")
FURTHER_SCHEDULES = ("independent", "dear", "ipart", "ps", "ps_layerwise")
"""Compete where they are asked to."""
DDP_BUCKETS_MB = (1, 25, 100)

NO_COMMUNICATION = "none"
PER_TENSOR = "mpi-per-tensor"
FLAT = "mpi-flat"


def _nothing() -> None:
    """What a contestant does after backward that exchanges nothing there."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One model with one way to exchange its gradients.

    Args:
        name: as in :data:`CONTESTANTS`.
        model: the plain model, whose parameters are compared.
        sgd: the plain optimizer, which holds the momentum.
        module: what is called in forward.
        optimizer: whose ``zero_grad`` and ``step`` are called.
        exchange: called between backward and step.
        report: what the contestant knows of itself.
    """

    name: str
    model: nn.Module
    sgd: torch.optim.SGD
    module: nn.Module
    optimizer: Any
    exchange: Callable[[], None] = _nothing
    report: Callable[[], dict[str, Any]] = dict

    def step(self, batch: Batch) -> None:
        """One training iteration."""
        self.optimizer.zero_grad()
        loss(self.module, batch).backward()  # type: ignore[no-untyped-call]
        self.exchange()
        self.optimizer.step()

    def reset(self, state: dict[str, Any], learning_rate: float) -> None:
        """Back to a model state, without momentum."""
        self.model.load_state_dict(state)
        self.sgd.state.clear()
        for group in self.sgd.param_groups:
            group["lr"] = learning_rate

    def settled(self) -> bool:
        """Whether the contestant has stopped choosing how to communicate."""
        return bool(self.report().get("phase", "installed") == "installed")

    def rest(self) -> None:
        """Give the memory of the gradients back while others run, and leave nothing under way."""
        self.optimizer.zero_grad()
        for _ in self.model.parameters():  # to read them is to wait for what still travels
            pass


Maker = Callable[[str, nn.Module, torch.optim.SGD], Contestant]


def _none(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    return Contestant(name, model, sgd, model, sgd)


def _mpi_per_tensor(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """One blocking all-reduce per gradient after backward, in place."""

    def exchange() -> None:
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient.numpy())
            gradient.div_(MPI.COMM_WORLD.size)

    return Contestant(name, model, sgd, model, sgd, exchange)


def _mpi_flat(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """All gradients copied into one buffer, one blocking all-reduce, and copied back."""
    parameters = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters))
    ends = accumulate(p.numel() for p in parameters)
    pieces = [
        flat[end - p.numel() : end].view_as(p) for end, p in zip(ends, parameters, strict=True)
    ]

    def exchange() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_copy_(pieces, gradients)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat.div_(MPI.COMM_WORLD.size)
        torch._foreach_copy_(gradients, pieces)

    return Contestant(name, model, sgd, model, sgd, exchange)


def _ddp(bucket_mb: int) -> Maker:
    def make(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
        # No other contestant exchanges the buffers of batch norm, so DDP need not either.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the option has two names over versions
            module = nn.parallel.DistributedDataParallel(
                model, bucket_cap_mb=bucket_mb, broadcast_buffers=False
            )
        return Contestant(name, model, sgd, module, sgd)

    return make


def _wfbp(schedule: str) -> Maker:
    def make(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
        import wfbp.torch

        optimizer = wfbp.torch.DistributedOptimizer(
            sgd, named_parameters=model.named_parameters(), schedule=schedule
        )
        return Contestant(name, model, sgd, model, optimizer, report=optimizer.report)

    return make


CONTESTANTS: dict[str, Maker] = {
    NO_COMMUNICATION: _none,
    PER_TENSOR: _mpi_per_tensor,
    FLAT: _mpi_flat,
    **{f"ddp-{mb}": _ddp(mb) for mb in DDP_BUCKETS_MB},
    **{f"wfbp-{schedule}": _wfbp(schedule) for schedule in (*SCHEDULES, *FURTHER_SCHEDULES)},
}
"""What can compete, by name; the order is that of the tables."""


DEFAULTS = [name for name in CONTESTANTS if name.removeprefix("wfbp-") not in FURTHER_SCHEDULES]


def is_ddp(name: str) -> bool:
    """Whether a contestant needs torch's process group."""
    return name.startswith("ddp-")


def is_wfbp(name: str) -> bool:
    """Whether a contestant is one of ours."""
    return name.startswith("wfbp-")

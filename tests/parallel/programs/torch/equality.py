"""Training on N ranks against one process on the concatenated batch.

Usage: mpirun -n N python equality.py OUT RUN [RUN ...], where a run is SCHEDULE/OPTIMIZER, with an
optimizer of :data:`OPTIMIZERS`; writes OUT/rank<r>.json, a list of one record per run. Every other
kind of optimizer trains in ``tests/fuzz/ordinary.py``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import freeze_imports
from tests.support.cores import leave_cores
from wfbp.config import Config

SCHEDULES: dict[str, dict[str, Any]] = {
    "auto": {"schedule": "auto"},
    "oasr": {"schedule": "oasr"},
    "mgwfbp": {"schedule": "mgwfbp"},
    "layerwise": {"schedule": "layerwise"},
    "single": {"schedule": "single"},
    "threshold": {"schedule": "threshold", "threshold_bytes": 200},
    "dear": {"schedule": "dear", "threshold_bytes": 300},
    "ipart": {"schedule": "ipart"},
    "independent": {"schedule": "independent"},
    "hybrid": {"schedule": "hybrid"},
    "ps": {"schedule": "ps"},
    "ps_layerwise": {"schedule": "ps_layerwise"},
}
CONFIG = Config(warmup_steps=1, profile_steps=1, trial_steps=2, probe_budget_s=0.05)
MIN_STEPS = 20
MAX_STEPS = 120
BATCH = 6


class Model(torch.nn.Module):
    """Odd sizes, a module used twice, one never used, a scalar parameter, a frozen one, a complex
    one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 13)
        self.shared = torch.nn.Linear(13, 13)
        self.norm = torch.nn.LayerNorm(13)
        self.unused = torch.nn.Linear(5, 3)
        self.frozen = torch.nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.temperature = torch.nn.Parameter(torch.tensor(1.5))
        self.last = torch.nn.Linear(13, 3)
        self.wave = torch.nn.Parameter(0.3 * torch.randn(13, dtype=dtype.to_complex()))
        if dtype is torch.float64:
            self.double()  # leaves the complex one as it is

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.shared(x))
        x = self.norm(self.frozen(torch.tanh(self.shared(x))))
        # Not its conjugate: PyTorch's Adam refuses gradients that are lazy conjugates.
        wave = torch.complex(x, x.roll(1, 1)) @ self.wave
        out: torch.Tensor = self.last(x) * self.temperature
        return out + 0.1 * (wave.real + 2 * wave.imag)[:, None]


def param_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups with different hyperparameters."""
    flat = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [
        {"params": matrices, "lr": 0.02, "weight_decay": 0.05},
        {"params": flat, "lr": 0.005, "weight_decay": 0.0},
    ]


Make = Callable[[torch.nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda m: torch.optim.SGD(param_groups(m), momentum=0.9),
    "nesterov": lambda m: torch.optim.SGD(param_groups(m), momentum=0.9, nesterov=True),
    # A larger epsilon: the default turns rounding errors of gradients near 0 into full steps.
    "adamw": lambda m: torch.optim.AdamW(param_groups(m), eps=1e-4),
    # In float64 these errors are too small for that.
    "adamw with its default epsilon": lambda m: torch.optim.AdamW(param_groups(m)),
}


DOUBLE = "adamw with its default epsilon"
"""In float64."""


def distance(one: Model, other: Model) -> float:
    """Largest difference of a parameter, relative to the largest entry of its tensor."""
    differences = [
        (a - b).abs().max() / b.abs().max().clamp(min=1e-30)
        for a, b in zip(one.parameters(), other.parameters(), strict=True)
    ]
    return torch.stack(differences).max().item()  # no number where any is none


def batch(step: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH * size, 7, generator=generator, dtype=torch.float64)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:].sum(1)], 1)
    return x.to(dtype), y.to(dtype)


def loss_of(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x), y)


def fingerprint(model: Model) -> str:
    state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(state).hexdigest()


def train(schedule: str, optimizer_name: str) -> dict[str, Any]:
    rank, size = wfbp.rank(), wfbp.size()
    make = OPTIMIZERS[optimizer_name]
    dtype = torch.float64 if optimizer_name == DOUBLE else torch.float32
    torch.manual_seed(7)
    reference = Model(dtype)
    model = copy.deepcopy(reference)
    before = copy.deepcopy(reference)
    optimizer = wfbp.torch.DistributedOptimizer(
        make(model), model.named_parameters(), **SCHEDULES[schedule]
    )
    plain = make(reference)
    phases: list[str] = []
    after_twenty = float("inf")
    steps = 0
    for step in range(MAX_STEPS):
        x, y = batch(step, size, dtype)
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        plain.step()
        optimizer.zero_grad()
        mine = slice(rank * BATCH, (rank + 1) * BATCH)
        loss_of(model, x[mine], y[mine]).backward()
        optimizer.step()
        steps = step + 1
        phase = optimizer.report().get("phase", "installed")
        if phase not in phases:
            phases.append(phase)
        if steps == MIN_STEPS:
            after_twenty = distance(model, reference)
        if steps >= MIN_STEPS and phase == "installed":
            break
    everybody = wfbp.allgather_object(fingerprint(model))
    exchange = optimizer._wfbp_sync
    return {
        "schedule": schedule,
        "optimizer": optimizer_name,
        "dtype": str(dtype).removeprefix("torch."),
        "steps": steps,
        "phases": phases,
        "num_groups": optimizer.report().get("num_groups"),
        "decoupled": exchange is not None and exchange.reducer.decoupled,
        "after_twenty": after_twenty,
        "at_the_end": distance(model, reference),
        "moved": (model.first.weight - before.first.weight).abs().max().item(),
        "ranks_equal": len(set(everybody)) == 1,
        "unused_has_gradient": model.unused.weight.grad is not None,
        "unused_moved": not torch.equal(model.unused.weight, before.unused.weight),
        "frozen_moved": not torch.equal(model.frozen.weight, before.frozen.weight),
    }


def main() -> None:
    torch.set_num_threads(1)
    freeze_imports()
    leave_cores()
    out, *runs = sys.argv[1:]
    wfbp.init(config=CONFIG)
    records = [train(*run.split("/")) for run in runs]
    Path(out, f"rank{wfbp.rank()}.json").write_text(json.dumps(records))


if __name__ == "__main__":
    main()

"""What programs do around the steps of decoupled training, for every kind of update.

Each check trains beside one process
on the concatenated batch, with several parameter groups; between the steps it reads parameters
only where the program would, so that updates are mostly still due when the next step begins.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.harness import Checks
from tests.parallel.programs.torch.equality import param_groups
from tests.parallel.programs.torch.further_optimizers import Normalized
from tests.parallel.programs.torch.training import (
    adamw,
    check_training,
    data,
    equal,
    mlp,
    momentum,
    same,
    square,
    twins,
)
from wfbp.runtime import process as runtimes

check = Checks()

SCHEDULES: dict[str, dict[str, Any]] = {
    # From a threshold at which the model makes several groups.
    "dear": {"schedule": "dear", "threshold_bytes": 300},
    "ipart": {"schedule": "ipart"},
    "hybrid": {"schedule": "hybrid"},
}

Make = Callable[[nn.Module], torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "sharded": lambda m: torch.optim.AdamW(param_groups(m)),
    # Its update needs whole tensors.
    "per tensor": lambda m: Normalized(param_groups(m)),
}

STEPS = 18
SAMPLES = 6
INFINITE = (3, 9, 10, 17)
"""Steps in which one sample has an infinite loss, where a program scales losses."""


@dataclass(frozen=True, slots=True)
class Habits:
    """What a program does beside forward, backward and step.

    Args:
        slows: a scheduler steps behind each step of the optimizer.
        limit: of the gradients' norm; 0: they are not clipped.
        scales: losses are scaled, and some are infinite.
        evaluates: the model is called without gradients after some steps.
        passes: backward passes per step.
        keeps: gradients are zeroed where they lie.
        looks: at averages, in every third step.
    """

    slows: bool = False
    limit: float = 0.0
    scales: bool = False
    evaluates: bool = False
    passes: int = 1
    keeps: bool = False
    looks: bool = False


HABITS = {
    "scheduler": Habits(slows=True),
    "clipping": Habits(limit=0.02),
    "scaler": Habits(scales=True),
    "evaluation": Habits(evaluates=True),
    "accumulation": Habits(passes=3),
    "averages": Habits(keeps=True, looks=True),
    # A scaler looks at whole gradients.
    "a scaler and more": Habits(slows=True, limit=0.02, scales=True, evaluates=True, passes=2),
    "all but a scaler": Habits(slows=True, limit=0.02, evaluates=True, passes=2, keeps=True),
}


class Program:
    """A training program, on one of some ranks or alone."""

    def __init__(self, model: nn.Module, optimizer: Any, habits: Habits) -> None:
        self.model = model
        self.optimizer = optimizer
        self.habits = habits
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=8.0, growth_interval=5, enabled=habits.scales
        )

    def step(self, number: int, rank: int = 0, size: int = 1) -> dict[str, torch.Tensor]:
        """One step; what the program has seen."""
        habits, optimizer, scaler = self.habits, self.optimizer, self.scaler
        seen = {"scale": torch.tensor(scaler.get_scale())}
        optimizer.zero_grad(set_to_none=not habits.keeps)
        for k in range(habits.passes):
            mine = data(100 * k + number, 0, SAMPLES, 5)[rank::size]
            loss = self.model(mine).square().mean() / habits.passes
            if habits.scales and number in INFINITE and rank == 1 % size:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        ready: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if (habits.scales and habits.limit) or (habits.looks and number % 3 == 0):
            if size > 1:
                optimizer.synchronize()
                ready = optimizer.skip_synchronize()
            scaler.unscale_(optimizer)
        if habits.looks and number % 3 == 0:
            seen["gradient"] = self.model[0].weight.grad.clone()
        if habits.limit:
            seen["norm"] = self.clip(habits.limit)
        with ready:
            scaler.step(optimizer)
        scaler.update()
        if habits.slows:
            self.schedule.step()
            seen["rate"] = torch.tensor(optimizer.param_groups[0]["lr"])
        if habits.evaluates and number % 4 == 3:
            with torch.no_grad():
                seen["output"] = self.model(data(999, 0, 2, 5))
        return seen

    def clip(self, limit: float) -> torch.Tensor:
        if hasattr(self.optimizer, "clip_grad_norm_"):
            return self.optimizer.clip_grad_norm_(limit).double()
        return nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def save(self) -> dict[str, Any]:
        parts = ("model", "optimizer", "schedule", "scaler")
        return {part: getattr(self, part).state_dict() for part in parts}

    def load(self, saved: dict[str, Any]) -> None:
        for part, state in saved.items():
            getattr(self, part).load_state_dict(state)


def alone(kind: str, habits: Habits) -> Program:
    torch.manual_seed(23)
    model = mlp(5, 7, 7, 3)
    return Program(model, KINDS[kind](model), habits)


def together(schedule: str, kind: str, habits: Habits) -> Program:
    make = KINDS[kind]
    torch.manual_seed(23)
    model = mlp(5, 7, 7, 3)
    optimizer = wfbp.torch.DistributedOptimizer(
        make(model),
        model.named_parameters(),
        backward_passes_per_step=habits.passes,
        **SCHEDULES[schedule],
    )
    return Program(model, optimizer, habits)


def beside(schedule: str, kind: str, habits: Habits) -> None:
    """All that the program sees is what one process sees."""
    mine, reference = together(schedule, kind, habits), alone(kind, habits)
    start = copy.deepcopy(reference.model)
    for number in range(STEPS):
        found = mine.step(number, wfbp.rank(), wfbp.size())
        for what, wanted in reference.step(number).items():
            if wanted.isfinite().all():
                same(found[what], wanted, f"step {number}: {what}", 1e-11)
            else:
                assert not found[what].isfinite().all(), f"step {number}: {what}"
    exchange = mine.optimizer._wfbp_sync
    assert exchange.reducer.decoupled is (kind != "per tensor"), mine.optimizer.report()
    assert bool(exchange.update.sharding) is (kind == "sharded")
    equal(mine.model.parameters(), reference.model.parameters(), "at the end", 1e-11)
    moved = [
        float((p - q).detach().abs().max())
        for p, q in zip(mine.model.parameters(), start.parameters(), strict=True)
    ]
    assert min(moved) > 1e-5, moved


TOGETHER = ("scaler", "averages", "a scaler and more", "all but a scaler")
"""Habits of every kind of update. One habit alone is tried where ranks share the update."""

for _kind in KINDS:
    for _name, _habits in HABITS.items():
        if _kind != "sharded" and _name not in TOGETHER:
            continue
        for _schedule in ("dear", "hybrid") if _name == "all but a scaler" else ("ipart",):
            _check = partial(beside, _schedule, _kind, _habits)
            check.all[f"{_name}, {_kind}, {_schedule}"] = _check


@check
def one_rank_alone_synchronizes() -> None:
    """Then all get whole averages, though the others step at once."""
    for schedule in (None, "independent"):
        both = twins(adamw, named=True, schedule=schedule)
        for step in range(9):
            both.optimizer.zero_grad()
            square(both.model, wfbp.rank(), step)
            if wfbp.rank() == step % wfbp.size():
                both.optimizer.synchronize()
                both.step_synchronized()
            else:
                both.optimizer.step()
            both.follow(step)
            both.compare(f"{schedule}, step {step}")


@check
def sparse_gradients_made_dense() -> None:
    """Which a rank keeps as its own where it has shards of averages."""

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(torch.tensor([rank, step % 9])).square().sum().backward()

    for make in (momentum, Normalized):
        model = nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Linear(5, 2)).double()
        _, optimizer = check_training(
            model,
            backward,
            make,
            schedule="ipart",
            sparse_as_dense=True,
        )
        assert optimizer._wfbp_sync.reducer.decoupled is (make is momentum)


@check
def resuming() -> None:
    """From checkpoints, on more ranks."""
    everybody = MPI.COMM_WORLD
    config = runtimes.current("check").config
    habits = Habits(slows=True, limit=0.02)
    ways = [("dear", "per tensor"), *(("ipart", kind) for kind in KINDS)]
    references = {kind: alone(kind, habits) for kind in KINDS}
    saved: dict[tuple[str, str], bytes] = {}
    wfbp.shutdown()
    try:
        for phase, size in enumerate((everybody.size - 1, everybody.size)):
            numbers = range(phase * 10, phase * 10 + 10)
            group = everybody.Split(everybody.rank < size, everybody.rank)
            if everybody.rank < size:
                wfbp.init(group, config=config)
                for way in ways:
                    program = together(*way, habits)
                    if phase:
                        program.load(torch.load(io.BytesIO(saved[way]), weights_only=True))
                    for number in numbers:
                        program.step(number, wfbp.rank(), size)
                    file = io.BytesIO()
                    torch.save(program.save(), file)
                    saved[way] = file.getvalue()
                wfbp.shutdown()
            group.Free()
            saved = everybody.bcast(saved)
            for program in references.values():
                for number in numbers:
                    program.step(number)
            for way, written in saved.items():
                wanted = references[way[1]].save()
                alike(torch.load(io.BytesIO(written), weights_only=True), wanted, f"{way}: {phase}")
    finally:
        wfbp.init(config=config)


def alike(found: Any, wanted: Any, where: str) -> None:
    """Two states of the same form have the same numbers."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            alike(found[key], value, f"{where}, {key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for one, other in zip(found, wanted, strict=True):
            alike(one, other, where)
    elif isinstance(wanted, torch.Tensor | float):
        same(torch.as_tensor(found), torch.as_tensor(wanted), where, 1e-11)
    else:
        assert found == wanted, where

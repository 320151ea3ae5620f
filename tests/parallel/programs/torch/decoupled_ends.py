"""Training that ends while parameters still travel: by shutdown(), and with the program.

Usage: mpirun -n N python decoupled_ends.py OUT. Ranks end the program in different ways, and look
at the parameters once more when the runtime is gone.
"""

from __future__ import annotations

import atexit
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import wfbp
import wfbp.torch
from tests.parallel.programs.torch.training import averaged, mlp, same, square
from wfbp.config import Config

SETTINGS = Config(warmup_steps=1, profile_steps=1, probe_budget_s=0.02, timeout_s=60.0)
STEPS = 6
PAUSE_S = 0.2


class Pausing(torch.optim.SGD):
    """Takes its time over a step."""

    pause_s = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(self.pause_s)
        super().step()


class Training:
    """One that has come to its end, but for what is on its way; and beside it one process."""

    def __init__(self, schedule: str) -> None:
        torch.manual_seed(3)
        self.where = schedule
        self.model, self.reference = mlp(5, 7, 7, 3), mlp(5, 7, 7, 3)
        self.reference.load_state_dict(self.model.state_dict())
        self.held = list(self.model.parameters())
        self.optimizer: Any = wfbp.torch.DistributedOptimizer(
            Pausing(self.held, lr=0.05, momentum=0.9), schedule=schedule, optimizer_sharding=True
        )
        self.plain = plain = Pausing(self.reference.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            averaged(self.reference, square, step, wfbp.size())
            plain.step()
            square(self.model, wfbp.rank(), step)
            if step == STEPS - 1 and wfbp.rank() == 1:
                self.optimizer.pause_s = PAUSE_S  # others end while it has yet to send its shards
            self.optimizer.step()
            self.optimizer.zero_grad()
        assert self.optimizer._wfbp_sync.update.pending, self.where

    def check(self, read: Callable[[nn.Module], Any]) -> None:
        """Raise unless the parameters are those of one process."""
        wanted = self.reference.parameters()
        for k, (p, q) in enumerate(zip(read(self.model), wanted, strict=True)):
            same(p.detach(), q.detach(), f"{self.where}: parameter {k}", 1e-12)

    def check_state(self) -> None:
        """Raise unless the state, asked for here alone, is that of one process."""
        wanted = self.plain.state_dict()["state"]
        found = self.optimizer.state_dict()["state"]
        assert found.keys() == wanted.keys(), self.where
        for k, values in wanted.items():
            for key, value in values.items():
                same(found[k][key], value, f"{self.where}: {key} of {k}", 1e-12)


def save_and_shut_down(training: Training) -> None:
    """Rank 0 saves when the others have long begun to leave."""
    if wfbp.rank() == 0:
        time.sleep(PAUSE_S)
        training.check_state()
    wfbp.shutdown()


def after(end: Callable[[Training], object]) -> str:
    """Train, end that, and look; what was found wrong."""
    wfbp.init(config=SETTINGS)
    training = Training("ipart")
    end(training)
    return look(training)


def look(training: Training) -> str:
    try:
        assert not wfbp.is_initialized()
        training.check(lambda model: training.held)  # without any hook
        training.check(lambda model: model.parameters())
        assert not training.optimizer._wfbp_sync.update.pending
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    wfbp.init(config=SETTINGS)
    rank = wfbp.rank()
    found = {"shutdown": after(save_and_shut_down)}

    def last() -> None:
        found["exit"] = look(training)
        (out / f"rank{rank}.json").write_text(json.dumps(found))

    atexit.register(last)  # which comes behind what init() registers
    wfbp.init(config=SETTINGS)
    training = Training("ps_layerwise")
    if rank == 0:
        sys.exit()
    time.sleep(PAUSE_S)
    try:
        training.check_state()  # rank 0 has parts of it, and ends
    except Exception:
        found["state"] = traceback.format_exc()


if __name__ == "__main__":
    main()

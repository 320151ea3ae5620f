"""Runs named checks on every rank, one after another, and keeps the ranks together.

A check is a function without arguments that raises where something is wrong. Errors of any
rank are written to OUT/rank<r>.json under the check's name. The next check then starts from a fresh
runtime, so that one defect fails one test. So it does behind a check that has made a runtime with
other settings.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI

import wfbp
from tests.support.cores import leave_cores
from tests.support.shared import NO_ERRORS
from wfbp.config import Config
from wfbp.core.cost import Costs
from wfbp.core.plan import Group, Plan
from wfbp.core.trace import Trace
from wfbp.core.types import Operation
from wfbp.runtime import process
from wfbp.runtime.tuning import tuner
from wfbp.runtime.tuning.candidates import fixed_candidates

Check = Callable[[], None]

STUCK_S = 760.0
"""Then every rank shows where it is, shortly before it is ended (``runs.JOB_S``)."""


def _short(schedule: str) -> Config:
    """A new plan at every step or two."""
    return Config(
        schedule=schedule,
        warmup_steps=1,
        profile_steps=1,
        trial_steps=1,
        timeout_s=60.0,
        probe_budget_s=0.02,
    )


MODES = {
    # Per-tensor messages that leave during backward, at every step.
    "overlap": Config(
        schedule="layerwise", warmup_steps=10**6, timeout_s=60.0, probe_budget_s=0.02
    ),
    # The same without shared memory.
    "messages": Config(
        schedule="layerwise",
        warmup_steps=10**6,
        timeout_s=60.0,
        probe_budget_s=0.02,
        shared_memory=False,
    ),
    "changing": _short("auto"),
    # Decoupled, and installed after a few steps.
    "ps_layerwise": _short("ps_layerwise"),
    "independent": _short("independent"),
    "mixed": _short("hybrid"),
}


def mixed(name: str, trace: Trace, costs: Costs, threshold_bytes: int) -> list[Plan]:
    """As ``hybrid``, but every other tensor is decoupled, whatever that costs."""
    if name != "hybrid":
        return fixed_candidates(name, trace, costs, threshold_bytes)
    last = len(trace.specs) - 1
    backward = (
        Group((k,), Operation.REDUCE_SCATTER if k % 2 else Operation.ALL_REDUCE)
        for k in range(last, -1, -1)
    )
    forward = (Group((k,), Operation.ALL_GATHER) for k in range(1, last + 1, 2))
    return [Plan(name, trace.specs, (*backward, *forward))]


def freeze_imports() -> None:
    """Let no garbage collection look at the objects of modules, of which PyTorch has a million.

    Its compiler belongs to them, which the first optimizer imports.
    """
    gc.disable()
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")
    gc.freeze()
    gc.enable()


class Checks:
    """A registry of checks, by name.

    Args:
        parts: other registries, whose checks this one has too.
    """

    def __init__(self, *parts: Checks) -> None:
        self.all: dict[str, Check] = {}
        self.with_own_schedules: set[str] = set()
        """Checks for which one mode of each number of ranks is enough."""
        for part in parts:
            assert not self.all.keys() & part.all.keys()
            self.all.update(part.all)
            self.with_own_schedules |= part.with_own_schedules

    def __call__(self, check: Check) -> Check:
        self.all[check.__name__] = check
        return check

    def by_own_schedules(self, check: Check) -> Check:
        """Register a check that sets schedules itself."""
        self.with_own_schedules.add(check.__name__)
        return self(check)

    def main(self) -> None:
        """``program.py OUT MODE [NAME ...]``."""
        out, mode, *names = sys.argv[1:]
        if mode == "mixed":
            tuner.fixed_candidates = mixed
        torch = sys.modules.get("torch")  # which programs for JAX need not load
        if torch is not None:
            torch.set_num_threads(1)
        faulthandler.dump_traceback_later(STUCK_S)
        freeze_imports()
        leave_cores()
        warnings.simplefilter("error")
        for message in NO_ERRORS:
            warnings.filterwarnings("ignore", message)
        world = MPI.COMM_WORLD
        wfbp.init(config=MODES[mode])
        results: dict[str, str] = {}
        for name, check in self.all.items():
            if names and name not in names:
                continue
            if torch is not None:
                torch.manual_seed(11)
            problem = ""
            try:
                check()
            except (Exception, pytest.fail.Exception):
                problem = traceback.format_exc()
            results[name] = problem
            arrived = world.Ibarrier()
            while not arrived.Test():
                time.sleep(1e-3)  # MPI would take the core that a slower rank needs
            failed = any(world.allgather(problem))
            if failed:
                print(f"rank {world.rank}: {name} failed\n{problem}", file=sys.stderr, flush=True)
            if failed or process.current("a check").config != MODES[mode]:
                wfbp.shutdown()
                wfbp.init(config=MODES[mode])
        faulthandler.cancel_dump_traceback_later()
        Path(out, f"rank{world.rank}.json").write_text(json.dumps(results))


def raises(kind: type[BaseException], *parts: str, act: Callable[[], object]) -> None:
    """The act raises this error, whose message has these parts."""
    with pytest.raises(kind) as caught:
        act()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"

"""Many programs under one mpirun, each on a fresh runtime.

Usage: mpirun -n N python -m tests.fuzz.job OUT PROGRAM_S, where OUT/programs.json is a list of
programs. Each rank appends a line to OUT/rank<r>.jsonl when it begins a program (``begun``) and
when it knows what came of it (``problem``: empty, or text). The first problem ends the job, so that
nothing that it leaves behind is taken for another.
"""

from __future__ import annotations

import faulthandler
import hashlib
import io
import json
import sys
import time
import traceback
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import wfbp.torch as wfbp
from tests.fuzz.interpreter import Run, difference, rounding_decides
from tests.fuzz.program import Act, Program, Step, loads
from tests.parallel.programs.harness import freeze_imports, mixed
from tests.support.cores import leave_cores
from tests.support.hosts import Hosts, as_on_hosts, in_rows
from wfbp.config import Config
from wfbp.core import types
from wfbp.runtime.lane import Lane
from wfbp.runtime.tuning import tuner

TOGETHER = 6
"""After so many programs their references run, shared out among the ranks."""


def config_of(program: Program) -> Config:
    """Settings under which plans change at every step or two, or not at all."""
    return Config(
        warmup_steps=1 if program.changing else 10**6,
        profile_steps=1,
        trial_steps=1,
        probe_budget_s=0.01,
        shared_memory=program.shared_memory,
        zero_copy_min_bytes=program.direct_bytes,
        stall_warning_s=12.0,
        timeout_s=60.0,
        log_level="error",
    )


def digest(values: Any) -> str:
    """The same for the same bits."""
    file = io.BytesIO()
    for value in values:
        if isinstance(value, torch.Tensor):
            dense = value.to_dense() if value.is_sparse else value
            file.write(f"{dense.dtype}{tuple(dense.shape)}".encode())
            file.write(dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            file.write(repr(value).encode())
    return hashlib.sha256(file.getvalue()).hexdigest()


def unequal(world: MPI.Intracomm, run: Run) -> str:
    """Where ranks have observed different bits; empty where they have not."""
    mine = [(label, [digest([v]) for v in values]) for label, values in run.seen] + [
        (f"refused {sorted(run.refused)}", [])
    ]
    every = world.allgather(mine)
    for rank, theirs in enumerate(every):
        for one, other in zip(every[0], theirs, strict=False):
            if one != other:
                if one[0] != other[0]:
                    return f"rank 0: {one[0]}, rank {rank}: {other[0]}"
                pairs = zip(one[1], other[1], strict=False)
                at = next((n for n, (a, b) in enumerate(pairs) if a != b), -1)
                values = next(values for label, values in run.seen if label == one[0])
                return (
                    f"{one[0]}: ranks 0 and {rank} differ in [{at}] of {len(one[1])} and "
                    f"{len(other[1])}; here {str(values[max(at - 1, 0) : at + 1])[:400]}"
                )
        if len(theirs) != len(every[0]):
            return f"rank {rank} observed {len(theirs)} times, rank 0 {len(every[0])} times"
    return ""


def gather(world: MPI.Intracomm, text: str) -> list[str]:
    """Every rank's text; waits without taking a core."""
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(5e-4)
    found: list[str] = world.allgather(text)
    return found


def layout_of(program: Program, size: int) -> Hosts:
    """The hosts that ranks are on."""
    if not program.compression:
        return in_rows([size])
    return in_rows([1] * size if program.seed % 2 else [2] + [1] * (size - 2))


def without_schedules(program: Program) -> Program:
    """The same, but each step sends everything at its end, in one message."""
    plain = [replace(o, schedule="single", update="auto") for o in program.optimizers]
    actions = [
        replace(a, schedule="single") if isinstance(a, Act) and a.schedule else a
        for a in program.actions
    ]
    return replace(program, optimizers=tuple(plain), actions=tuple(actions), changing=False)


def plans_are_alike(program: Program) -> bool:
    """Whether all plans send the same gradients: not if gradients change, or are thrown away, after
    some plans have sent them; nor if they are kept for the next step, as averages or a rank's."""
    steps = [action for action in program.actions if isinstance(action, Step)]
    return not (
        any(isinstance(a, Act) and a.do in ("discard", "clear") for a in program.actions)
        or any(step.discard or step.error or step.gradients.startswith("touch") for step in steps)
        or any(step.zero in ("carry", "list") for step in steps)
    )


def run_one(world: MPI.Intracomm, program: Program) -> tuple[Run | None, str]:
    """A program on all ranks; what this rank finds wrong with it."""
    if not program.compression:
        return run_once(world, program)
    least, types.ENCODED_FROM_BYTES = types.ENCODED_FROM_BYTES, 1
    _reduced_now.clear()
    try:
        run, problem = run_once(world, program)
        if problem or run is None:
            return run, problem
        other, problem = run_once(world, without_schedules(program))
    finally:
        types.ENCODED_FROM_BYTES = least
    if problem or other is None or _reduced_now or not plans_are_alike(program):
        return run, problem
    both = [[(label, digest(values)) for label, values in each.seen] for each in (run, other)]
    pairs = zip(*both, strict=False)
    differs = next((f"{a[0]} has other bits than by single" for a, b in pairs if a != b), "")
    return run, differs or ("" if len(both[0]) == len(both[1]) else "single observes other things")


_reduced_now: list[None] = []


def note_reduce_now() -> None:
    """Note when gradients are reduced outside of a plan."""
    method = Lane.reduce_now

    def noting(*args: Any) -> Any:
        _reduced_now.append(None)
        return method(*args)

    Lane.reduce_now = noting  # type: ignore[method-assign]


def run_once(world: MPI.Intracomm, program: Program) -> tuple[Run | None, str]:
    """A program on all ranks, and whether these are equal."""
    with as_on_hosts(partial(layout_of, program)):
        wfbp.init(config=config_of(program))
    problem, run = "", None
    try:
        run = Run(program, world.rank)
        run.run()
    except Exception:
        place = "" if run is None else run.place
        problem = f"{place}: {traceback.format_exc()}"
    every = gather(world, problem)
    if any(every):
        return run, problem or "fails on another rank"
    assert run is not None
    problem = unequal(world, run)
    wfbp.shutdown()
    return run, problem


def main() -> None:
    out, program_s = Path(sys.argv[1]), float(sys.argv[2])
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    freeze_imports()
    leave_cores()
    note_reduce_now()
    tuner.fixed_candidates = mixed  # hybrid plans of small models are one group otherwise
    world = MPI.COMM_WORLD
    programs = [loads(text) for text in json.loads((out / "programs.json").read_text())]
    with (out / f"rank{world.rank}.jsonl").open("a") as file:

        def tell(**what: Any) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        done: list[tuple[int, Run]] = []
        for n, program in enumerate(programs):
            tell(program=n, begun=True)
            faulthandler.dump_traceback_later(program_s, exit=True)
            run, problem = run_one(world, program)
            faulthandler.cancel_dump_traceback_later()
            failed = any(gather(world, problem))
            if run is not None and not failed:
                done.append((n, run))
            if failed or len(done) == TOGETHER or n == len(programs) - 1:
                faulthandler.dump_traceback_later(2 * program_s, exit=True)
                for place, (number, ours) in enumerate(done):
                    if place % world.size == world.rank:
                        tell(program=number, problem=compared(ours))
                faulthandler.cancel_dump_traceback_later()
                done.clear()
            if failed:
                tell(program=n, problem=problem)
                break
    gather(world, "")
    sys.stdout.flush()


def compared(run: Run) -> str:
    """How a rank's run differs from the reference; empty if it does not."""
    if run.program.compression:
        return ""
    if "torch._dynamo" in sys.modules:  # whose import takes seconds
        torch._dynamo.reset()
    reference = Run(run.program, None, run.refused)
    try:
        reference.run()
    except Exception:
        return f"reference: {reference.place}: {traceback.format_exc()}"
    problem = difference(run, reference)
    return "" if problem and rounding_decides(run, reference) else problem


if __name__ == "__main__":
    main()

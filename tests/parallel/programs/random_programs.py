"""Random training loops on a real job: every reduced gradient is compared with the mean.

Usage: mpirun -n N python random_programs.py OUT NUM_PROGRAMS
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import wfbp
from tests.unit.trainer import Trainer, make_specs, mean, number
from wfbp.config import Config
from wfbp.runtime import world
from wfbp.runtime.runtime import Runtime

SCHEDULES = ("auto", "oasr", "mgwfbp", "wfbp", "single", "threshold")
STEPS = 15
LARGE = (0, 1, 1000, 20_000, 300_000)


def size_of_tensor(chance: random.Random) -> int:
    return chance.choice(LARGE) if chance.random() < 0.3 else chance.randint(1, 40)


def script(chance: random.Random, sizes: list[int], ranks: int, to_none: bool) -> dict[str, Any]:
    """What the ranks do with one optimizer in one step; every rank draws the same."""

    def grid(likely: float) -> list[list[bool]]:
        return [[chance.random() < likely for _ in sizes] for _ in range(ranks)]

    return {
        "discard": chance.random() < 0.15,
        "discarded": grid(0.6) if to_none else [[True] * len(sizes)] * ranks,
        "passes": chance.choice([1, 1, 1, 2, 3]) if to_none else 1,
        "present": grid(0.8),
        "values": [[float(chance.randint(-9, 9)) for _ in sizes] for _ in range(ranks)],
    }


def run(runtime: Runtime, seed: int) -> None:
    """One program: one or two optimizers, discarded passes, accumulation, talk in between."""
    chance = random.Random(seed)
    own = random.Random(seed + runtime.rank)
    rank, ranks = runtime.rank, runtime.size
    shapes = [
        [size_of_tensor(chance) for _ in range(chance.randint(1, 9))]
        for _ in range(chance.choice([1, 1, 2]))
    ]
    to_none = chance.random() < 0.6
    trainers = [
        Trainer(runtime, make_specs(s), schedule=chance.choice(SCHEDULES), name=f"optimizer {k}")
        for k, s in enumerate(shapes)
    ]
    for step in range(STEPS):
        parts = [script(chance, s, ranks, to_none) for s in shapes]
        before = []
        for trainer, part in zip(trainers, parts, strict=True):
            trainer.zero(to_none)
            if part["discard"]:
                for k, here in enumerate(part["discarded"][rank]):
                    if here:
                        trainer.accumulate(k, 1e6)
                trainer.zero(to_none)
            before.append([None if g is None else number(g) for g in trainer.grads])
        for trainer, part in zip(trainers, parts, strict=True):
            indices = range(len(trainer.specs))
            for _ in range(part["passes"]):
                for k in own.sample(indices, len(indices)):
                    if part["present"][rank][k]:
                        trainer.accumulate(k, part["values"][rank][k])
                    if own.random() < 0.02:
                        time.sleep(0.003 * own.random())
        if chance.random() < 0.2:
            assert wfbp.allreduce(np.ones(chance.choice([1, 5000])), op=wfbp.Sum)[0] == ranks
        for trainer, part, held in zip(trainers, parts, before, strict=True):
            wanted = []
            for k, spec in enumerate(trainer.specs):
                rows = [
                    part["passes"] * part["values"][r][k] if part["present"][r][k] else held[k]
                    for r in range(ranks)
                ]
                wanted.append(mean([v if v is None or spec.numel else 0.0 for v in rows]))
            found = trainer.synchronize()
            for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
                where = f"seed {seed}, step {step}, tensor {k}: {a}, not {b}"
                assert (a is None) == (b is None), where
                assert a is None or b is None or abs(a - b) < 1e-9, where
    for trainer in trainers:
        trainer.engine.close()


def main() -> None:
    out, count = Path(sys.argv[1]), int(sys.argv[2])
    config = Config(
        direct_bytes=64,
        warmup_steps=1,
        profile_steps=1,
        trial_steps=1,
        trial_s=0.0,
        probe_s=0.01,
        timeout_s=20.0,
    )
    wfbp.init(config=config)
    runtime = world.current("main()")
    for seed in range(count):
        run(runtime, seed)
    (out / f"rank{runtime.rank}.json").write_text(json.dumps(count))


if __name__ == "__main__":
    main()

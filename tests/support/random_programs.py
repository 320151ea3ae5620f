"""Random training programs that every rank runs, and what they have to compute.

Both take a ``Trainer`` or a ``DeviceTrainer``, whose tensors are known by a number each.
"""

from __future__ import annotations

import random
from typing import Any

from tests.support.trainer import mean
from wfbp.core.types import Op


def reduce_at_random(
    trainer: Any,
    seed: int,
    num_steps: int,
    to_none: bool,
    unit: float = 1.0,
    most: int = 9,
    accumulates: bool = True,
) -> None:
    """Any tensors in any order on any rank, discarded passes, accumulation, changing plans."""
    rank, size, count = trainer.rank, trainer.size, len(trainer.specs)
    chance, order = random.Random(seed), random.Random(seed + rank)
    # What p.grad holds before a step, by rank: zeros where it was zeroed in place.
    held: list[list[float | None]] = [[None] * count for _ in range(size)]
    for number in range(num_steps):
        discards = chance.random() < 0.15
        passes = chance.choice([1, 1, 1, 2, 3]) if to_none and accumulates else 1
        discarded, grads = (
            [[chance.random() < share for _ in range(count)] for _ in range(size)]
            for share in (0.6, 0.8)
        )
        values = [[unit * chance.randint(-most, most) for _ in range(count)] for _ in range(size)]
        trainer.zero(to_none)
        held = [[None if to_none or v is None else 0.0 for v in row] for row in held]
        trainer.forward()
        if discards:
            for k in range(count):
                if not to_none or discarded[rank][k]:
                    trainer.accumulate(k, 1e6)
            trainer.backward_ends()
            trainer.zero(to_none)
            if not to_none:
                held = [[0.0] * count for _ in range(size)]
            trainer.forward()
        for _ in range(passes):
            for k in order.sample(range(count), count):
                if grads[rank][k]:
                    trainer.accumulate(k, values[rank][k])
            trainer.backward_ends()
            trainer.forward()
        wanted = [
            mean([passes * values[r][k] if grads[r][k] else held[r][k] for r in range(size)])
            for k in range(count)
        ]
        trainer.check(wanted, f"step {number}")
        held = [list(wanted) for _ in range(size)]
    trainer.finish()


def update_at_random(
    trainer: Any, seed: int, num_steps: int, op: Op = Op.AVERAGE, unit: float = 1.0
) -> None:
    """Any tensors in any order, read in any order, discarded, missing; whole if a rank needs that.

    Updates subtract the gradients.
    """
    rank, size, count = trainer.rank, trainer.size, len(trainer.specs)
    chance, order = random.Random(seed), random.Random(seed + rank)
    expected = [0.0] * count
    for number in range(num_steps):
        where = f"step {number}"
        discards = chance.random() < 0.15
        whole = [chance.random() < 0.1 for _ in range(size)]
        grads = [[chance.random() < 0.8 for _ in range(count)] for _ in range(size)]
        values = [[unit * chance.randint(-9, 9) for _ in range(count)] for _ in range(size)]
        for k in chance.sample(range(count), chance.randint(0, count)):
            trainer.read(k, expected[k], where)
        if discards:
            for k in order.sample(range(count), count):
                trainer.accumulate(k, 1e6)
        trainer.zero()
        for k in order.sample(range(count), count):
            if grads[rank][k]:
                trainer.accumulate(k, values[rank][k])
        factor = size if op is Op.SUM else 1
        wanted: list[float | None] = []
        for k in range(count):
            average = mean([values[r][k] if grads[r][k] else None for r in range(size)])
            wanted.append(None if average is None else average * factor)
            expected[k] -= wanted[k] or 0.0
        trainer.step(wanted, where, whole[rank])
    for k, value in enumerate(expected):
        trainer.read(k, value, "at the end")
    trainer.finish()

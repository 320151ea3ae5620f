"""What is promised of GPUs, checked against a run of the benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wfbp.bench.gpu_pack import COPY, LARGE, PACK, TINY, UNPACK, Timing
from wfbp.bench.training_contestants import NO_COMMUNICATION
from wfbp.bench.training_targets import AUTO, Target

DDP = "ddp-25"
TIMED = (NO_COMMUNICATION, DDP, AUTO)
"""Contestants whose steps are timed; the others are only compared."""

ENOUGH_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Training:
    """One model, trained by every contestant.

    Args:
        model: its name.
        title: for tables.
        num_tensors: of its gradient.
        num_bytes: of its gradient.
        num_ranks: that trained together, all on one device.
        step_s: by contestant, seconds per step in each round.
        differences: of parameters from the reference's, by contestant, relative to their norm.
        reports: what wfbp's optimizers know of themselves, by contestant.
    """

    model: str
    title: str
    num_tensors: int
    num_bytes: int
    num_ranks: int
    step_s: dict[str, tuple[float, ...]]
    differences: dict[str, float | None]
    reports: dict[str, dict[str, Any]]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Training:
        """From what :meth:`to_json` made."""
        rounds = {name: tuple(values) for name, values in data["step_s"].items()}
        return cls(**{**data, "step_s": rounds})

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    def ratio(self, name: str, other: str) -> float | None:
        """A contestant's step over another's, median of the rounds; None where one is absent."""
        if name not in self.step_s or other not in self.step_s:
            return None
        pairs = zip(self.step_s[name], self.step_s[other], strict=True)
        return statistics.median(mine / its for mine, its in pairs)


def pack_targets(timings: Sequence[Timing]) -> Iterator[Target]:
    """Bandwidth of large groups, and time of small ones."""
    found = {(timing.mix, timing.way): timing for timing in timings}
    for way in (PACK, UNPACK):
        large, tiny = found[LARGE.name, way], found[TINY.name, way]
        yield Target(LARGE.name, f"{way}: over {COPY}", large.of_copy, 1 / 0.85, True)
        yield Target(TINY.name, f"{way}: microseconds", tiny.median_us, 10.0, True)


def training_targets(runs: Sequence[Training]) -> Iterator[Target]:
    """What wrapping costs; and that nothing is slower than DDP."""
    for run in runs:
        where = f"{run.model}, {run.num_ranks} rank{'s' if run.num_ranks > 1 else ''}"
        judged = [("auto over DDP", run.ratio(AUTO, DDP), 1.0)]
        if run.num_ranks == 1:
            bare = run.ratio(AUTO, NO_COMMUNICATION)
            judged.append(("auto over the bare optimizer", bare, 1.01))
        for what, value, limit in judged:
            if value is not None:
                decided = len(run.step_s[AUTO]) >= ENOUGH_ROUNDS
                yield Target(where, what, value, limit, decided)

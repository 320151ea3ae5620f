"""What the ranks of a training benchmark do alike, whatever their framework."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mpi4py import MPI

from wfbp.bench.training_results import Block, ContestantResult, ModelResult
from wfbp.bench.training_settings import Settings


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

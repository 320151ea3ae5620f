"""Timing: short blocks of every contestant in turn, until enough of them were undisturbed."""

from __future__ import annotations

import math
import os
import random
import resource
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from mpi4py import MPI

from wfbp.bench.load import sent_bytes, thread_seconds, usage
from wfbp.bench.training_contestants import NO_COMMUNICATION
from wfbp.bench.training_ranks import Contestant
from wfbp.bench.training_results import Block
from wfbp.bench.training_settings import Settings

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
        if name != NO_COMMUNICATION and sent and min(sent) < LINK_SHARE * num_bytes:
            raise RuntimeError(
                f"{name} put {min(sent):.0f} bytes per iteration on the link, expected at least "
                f"{LINK_SHARE * num_bytes:.0f}: its ranks spoke to each other by another road"
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

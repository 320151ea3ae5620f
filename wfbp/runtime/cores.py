"""Whether ranks share cores, or have more threads than cores: both slow down all ranks."""

from __future__ import annotations

import os

from wfbp.launcher.rank import number


def own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def num_threads() -> int | None:
    """Threads per rank that the environment asks for; None if it does not say."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return number(("told",), {"told": told}) or None


def part_of_cores(ranks: int, cores: int, threads: int | None) -> float:
    """The part of its compute that a rank loses to a busy communication thread, if so many ranks
    use these cores. Frameworks use all cores if the environment does not say.

    >>> part_of_cores(2, 2, 1), part_of_cores(1, 8, 8), part_of_cores(2, 4, 1)
    (1.0, 0.125, 0.0)
    """
    if threads is not None and cores >= ranks * (threads + 1):
        return 0.0
    return min(1.0, ranks / cores)


def advice(ranks: int, cores: int, threads: int, by_wfbprun: bool = False) -> str:
    """A warning with its remedy if this many ranks, with this many threads each, share too few
    cores; else empty.

    >>> advice(2, 4, 4)
    '2 ranks with 4 threads each use the same 4 cores, so threads wait for each other. Start with \
wfbprun, which divides the cores among ranks, or set OMP_NUM_THREADS=2'
    >>> advice(2, 4, 2), advice(1, 4, 4)
    ('', '')
    """
    have = f"{'the same ' * (ranks > 1)}{cores} cores" if cores > 1 else "one core"
    if ranks > cores:
        return (
            f"{ranks} ranks use {have}, and take turns. Start fewer ranks, or ask for a core per "
            "rank (Slurm: --cpus-per-task)"
            + ("" if by_wfbprun else ", or bind them to different cores (wfbprun does)")
        )
    if ranks * threads <= cores:
        return ""
    who = (
        f"{ranks} ranks with {threads} threads each use" if ranks > 1 else f"{threads} threads use"
    )
    start = "" if by_wfbprun else "Start with wfbprun, which divides the cores among ranks, or set"
    return (
        f"{who} {have}, so threads wait for each other. {start or 'Set'} "
        f"OMP_NUM_THREADS={cores // ranks}"
    )

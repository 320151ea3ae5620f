"""One process of JAX as one of two ranks, on a link that exists only as a cost."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

import wfbp.jax as wfbp
from wfbp.comm.emulated import Curve, EmulatedLink
from wfbp.config import Config

MOST_STEPS = 1000


def compute_on_one_core() -> None:
    """Have XLA's threads stay on one core; call it before JAX computes anything. Linux only.

    XLA takes all cores there are; a rank has its share of them, and communication some of the rest.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    jax.block_until_ready(jax.device_put(0.0))
    os.sched_setaffinity(0, cores)


@contextmanager
def emulated(cost: Curve, config: Config) -> Iterator[None]:
    """Within it this process is rank 0 of two; a message of n bytes takes ``cost(n)`` seconds."""
    wfbp.init(backend=EmulatedLink(cost, size=2), config=config)
    try:
        yield
    finally:
        wfbp.shutdown()


def settle(step: Callable[[], Any], name: str) -> None:
    """Step until the exchange of this name has installed its plan.

    Raises:
        RuntimeError: it does not.
    """
    for _ in range(MOST_STEPS):
        jax.block_until_ready(step())
        if wfbp.report()[name]["phase"] == "installed":
            return
    raise RuntimeError(f"{name} has not installed a plan after {MOST_STEPS} steps")


def interleaved(
    contestants: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each contestant's steps, one of each in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for act in contestants.values():
        jax.block_until_ready(act())
    for _ in range(rounds):
        for name, act in contestants.items():
            start_s = time.perf_counter()
            jax.block_until_ready(act())
            seconds[name].append(time.perf_counter() - start_s)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each."""
    return {name: statistics.median(times) for name, times in seconds.items()}

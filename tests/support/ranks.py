"""Ranks as threads, each with its own runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tests.support.local import LocalWorld
from wfbp.config import Config
from wfbp.core.cost import Costs
from wfbp.core.types import Operation
from wfbp.runtime.progress import loop
from wfbp.runtime.runtime import JobRuntime, Runtime

QUICK = Config(
    zero_copy_min_bytes=128,
    warmup_steps=1,
    profile_steps=1,
    trial_steps=1,
    probe_budget_s=0.01,
    timeout_s=60.0,
    abort_grace_s=1.0,
)


def limit_waits(runtime: Runtime, **limits: float) -> None:
    """From now on, by settings such as ``timeout_s``; what came before may have taken long."""
    detector = runtime.thread.loop.watch
    detector._config = replace(detector._config, **limits)  # type: ignore[arg-type]


class RankError(AssertionError):
    """A rank raised."""


def run_ranks(
    size: int,
    body: Callable[[Runtime], Any],
    config: Config = QUICK,
    configs: dict[int, Config] | None = None,
    join_s: float = 100.0,
) -> list[Any]:
    """What ``body`` returned on each rank, or the exception that it raised.

    Args:
        size: number of ranks.
        body: one rank's program; the runtime is shut down behind it.
        config: settings.
        configs: settings of single ranks.
        join_s: a rank that takes longer fails the test.
    """
    world = LocalWorld(size)
    results: list[Any] = [None] * size

    def rank_main(rank: int) -> None:
        runtime = JobRuntime(world.backend(rank), (configs or {}).get(rank, config))
        try:
            results[rank] = body(runtime)
        except Exception as error:
            results[rank] = error
        finally:
            runtime.shutdown()

    threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(size)]
    with patch.object(loop, "num_program_threads", lambda: 1):  # of each rank
        for thread in threads:
            thread.start()
        for rank, thread in enumerate(threads):
            thread.join(join_s)
            assert not thread.is_alive(), f"rank {rank} hangs"
    return results


def all_well(results: list[Any]) -> list[Any]:
    """The results, after raising the first exception among them."""
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            raise RankError(f"rank {rank}") from result
    return results


def measure_costs(
    runtime: Runtime,
    max_bytes: int,
    operations: Sequence[Operation] = (Operation.ALL_REDUCE,),
    anew: bool = False,
) -> Costs:
    """Measure the costs of the runtime's own messages; collective."""
    return runtime.network.measure(max_bytes, operations, anew, None, runtime.channel.call)

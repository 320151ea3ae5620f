"""A job in which one rank fails, leaves or differs while the others wait inside XLA.

Usage: mpirun -n N python jax_faults.py OUT CASE. The last rank does the deed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
if sys.argv[2] == "devices":
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp

import wfbp.jax as wfbp
from tests.support.ranks import limit_waits
from wfbp.runtime import process

STEPS = 4


def fail() -> None:
    raise ValueError("the data of this rank is broken")


def leave() -> None:
    sys.exit(0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # and no other thread goes on


DEEDS = {"fail": fail, "leave": leave, "die": die, "stop": stop}


def loss(p: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ p["w"]) ** 2) + jnp.sum(p["b"] ** 2)


def train(case: str, mine: bool) -> None:
    params = {"w": jnp.ones((8, 8)) / 8, "b": jnp.ones(3)}
    if case == "shapes" and mine:
        params["b"] = jnp.ones(5)
    if case == "schedules":
        step = jax.jit(wfbp.grad(loss, schedule="layerwise" if mine else "single"))
    else:
        step = jax.jit(wfbp.grad(loss))
    x = jnp.ones((4, 8))
    for number in range(STEPS):
        if number == STEPS - 1 and case in DEEDS:
            tell(wfbp.rank(), {"pid": os.getpid()})
            if mine:
                while not all(map(told, range(wfbp.size()))):
                    time.sleep(0.01)
                time.sleep(0.5)  # by now the others wait within their step
                DEEDS[case]()
            elif case == "stop":
                limit_waits(process.current("this program"), stall_warning_s=0.7, timeout_s=3.0)
        grads = step(params, x)
        if case == "unawaited":
            continue  # the program ends with steps under way
        jax.block_until_ready(grads)
    if case == "two":
        two_at_once(params, x)
    if case == "devices":
        mesh = jax.sharding.Mesh(jax.devices(), "data")
        spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        jax.block_until_ready(step(params, jax.device_put(x, spread)))
    if case == "again":
        again(step, params)


def told(rank: int) -> bool:
    """Whether a rank has told anything."""
    return Path(sys.argv[1], f"rank{rank}.json").exists()


def tell(rank: int, what: dict[str, Any]) -> None:
    """For the test, until something else is told."""
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(what))


def again(step: Any, params: Any) -> None:
    """The runtime is shut down with a step under way, made anew, and the program ends so too."""
    for _ in range(3):
        x = jnp.full((4, 8), wfbp.rank() + 1.0)
        grads = step(params, x)
        wfbp.shutdown()
        found = float(grads["b"][0])
        assert found == 2.0, found
        wfbp.init()
    step(params, x)


def two_at_once(params: Any, x: jax.Array) -> None:
    """Equal steps that two threads run beside each other, each long enough to meet the other."""

    def slow(p: Any, x: jax.Array) -> jax.Array:
        h = jax.lax.fori_loop(0, 3000, lambda _, h: jnp.tanh(h @ h), jnp.ones((64, 64)))
        return loss(p, x) + jnp.sum(h * p["w"][0, 0]) * 1e-9

    step = jax.jit(wfbp.grad(slow)).lower(params, x).compile()
    barrier = threading.Barrier(2)
    problems: list[Exception] = []

    def run() -> None:
        barrier.wait()
        try:
            for _ in range(20):
                jax.block_until_ready(step(params, x))
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for problem in problems:
        raise problem


def main() -> None:
    case = sys.argv[2]
    wfbp.init()
    rank = wfbp.rank()
    try:
        train(case, mine=rank == wfbp.size() - 1)
    except Exception as error:
        tell(rank, {"kind": type(error).__name__, "text": str(error)})
        raise


if __name__ == "__main__":
    main()

"""``python -m tests.benchmarks jax --overlap``: how much of the communication backward hides.

One process, which computes on one core, with a 20-layer network on an emulated link on which all
gradients in one message take 60% of backward's time. Whole steps are timed in turn: without
communication, with everything in one message behind backward (which hides nothing), and with wfbp.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import wfbp.jax as wfbp
from tests.benchmarks.jax_contestants import Params, mlp
from tests.benchmarks.turns import samples
from tests.support.emulated_link import Curve, EmulatedLink
from wfbp.cli.tables import print_table
from wfbp.config import Config


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
    for _ in range(1000):
        jax.block_until_ready(step())
        if wfbp.report()[name]["phase"] == "installed":
            return
    raise RuntimeError(f"{name} has not installed a plan")


def medians(contestants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of each contestant's steps, one of each in turn."""
    steps = {
        name: lambda act=act: jax.block_until_ready(act()) for name, act in contestants.items()
    }
    return {name: statistics.median(s) for name, s in samples(steps, rounds, 0.0).items()}


DEPTH, WIDTH, BATCH = 20, 512, 512
SHARE = 0.6
"""Of backward: what all gradients in one message take on the link."""
ALPHA_S = 1e-4
LIMIT = 0.25
SCHEDULES = ("single", "auto")


def main(rounds: int) -> int:
    """Measure and print."""
    compute_on_one_core()
    params = mlp(0, DEPTH, WIDTH)
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    whole = _training(jax.grad(_loss), params, x)
    forward = partial(jax.jit(_loss), params, x)
    alone = medians({"forward": forward, "whole": whole}, 10)
    link_s = SHARE * (alone["whole"] - alone["forward"])
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    beta = (link_s - ALPHA_S) / num_bytes
    with emulated(lambda n: ALPHA_S + beta * n, Config(replan_threshold=0.0)):
        steps: dict[str, Any] = {"no communication": whole}
        for schedule in SCHEDULES:
            grad = wfbp.grad(_loss, schedule=schedule, name=schedule)
            steps[schedule] = _training(grad, params, x)
            settle(steps[schedule], schedule)
        times = medians(steps, max(rounds, 10))
        groups = {name: wfbp.report()[name]["num_groups"] for name in SCHEDULES}
    print_table(
        f"{DEPTH} layers, {num_bytes / 1e6:.1f} MB, {link_s * 1e3:.1f} ms on the link: "
        f"{SHARE:.0%} of backward",
        ("<step", "groups", "median ms", "of the communication exposed", "at most", ""),
        [_row(name, times, link_s, groups) for name in times],
    )
    return 0


def _training(grad: Callable[..., Params], params: Params, x: jax.Array) -> Callable[[], Params]:
    """A step of gradient descent, in one compiled program that writes over its parameters."""

    def update(params: Params, x: jax.Array) -> Params:
        return jax.tree.map(lambda p, g: p - 1e-6 * g, params, grad(params, x))

    step = jax.jit(update, donate_argnums=0)
    held = [jax.tree.map(jnp.copy, params)]

    def act() -> Params:
        held[0] = step(held[0], x)
        return held[0]

    return act


def _loss(params: Params, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return jnp.square(x).mean()


def _row(
    name: str, times: dict[str, float], link_s: float, groups: dict[str, int]
) -> Sequence[str]:
    median = f"{times[name] * 1e3:.1f}"
    if name not in groups:
        return (name, "", median, "", "", "")
    exposed = (times[name] - times["no communication"]) / link_s
    verdict = ("met" if exposed <= LIMIT else "missed") if name == "auto" else ""
    limit = f"{LIMIT:.0%}" if name == "auto" else ""
    return (name, str(groups[name]), median, f"{exposed:.0%}", limit, verdict)

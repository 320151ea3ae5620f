"""``python -m tests.benchmarks jax --leaf``: what exchanging adds to a step, per leaf.

One process on a link that takes no time. Two models of small layers that differ in their number
of leaves only: what a step takes longer with wfbp than without, at one less at the other, over
the difference in leaves, is the cost of a leaf; what a step with its one wait and one message
costs in any case cancels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import wfbp.jax as wfbp
from tests.benchmarks.jax_contestants import mlp
from tests.benchmarks.jax_overlap import emulated, medians, settle
from wfbp.cli.tables import print_table
from wfbp.config import Config

LEAVES = (40, 160)
WIDTH = 8
SCHEDULES = ("threshold",)
LIMIT_US = 15.0


def main(rounds: int) -> int:
    """Measure and print."""
    added: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    with emulated(lambda _: 0.0, Config(probe_budget_s=0.1)):
        for leaves in LEAVES:
            times = _step_times(leaves, rounds)
            for schedule in SCHEDULES:
                added[schedule].append(times[schedule] - times["plain"])
    rows = []
    for schedule, (few_s, many_s) in added.items():
        each_us = (many_s - few_s) / (LEAVES[1] - LEAVES[0]) * 1e6
        fixed_us = few_s * 1e6 - LEAVES[0] * each_us
        verdict = "met" if each_us <= LIMIT_US else "missed"
        rows.append((schedule, f"{each_us:.2f}", f"{fixed_us:.0f}", f"{LIMIT_US:g}", verdict))
    print_table(
        f"What wfbp.jax adds to a step, from {LEAVES[0]} and {LEAVES[1]} leaves",
        ("<schedule", "us per leaf", "us per step", "at most", ""),
        rows,
    )
    return 0


def _step_times(leaves: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step, plain and by each schedule."""
    params = [layer["weight"] for layer in mlp(0, leaves, WIDTH)]
    x = jnp.ones((1, WIDTH))

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in params:
            x = jnp.tanh(x @ weight)
        return x.sum()

    steps: dict[str, Any] = {"plain": partial(jax.jit(jax.grad(loss)), params, x)}
    for schedule in SCHEDULES:
        name = f"{schedule}, {leaves} leaves"
        steps[schedule] = partial(jax.jit(wfbp.grad(loss, schedule=schedule, name=name)), params, x)
        settle(steps[schedule], name)
    return medians(steps, max(rounds, 20))

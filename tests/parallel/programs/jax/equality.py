"""Twenty steps of training, and the same on one process with the whole batch.

Usage: mpirun -n N python equality.py OUT
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import wfbp.jax as wfbp
from tests.parallel.programs.jax.training import data, difference, layers, mlp

STEPS = 20
ROWS = 24
WAYS = (
    ("value_and_grad", "auto"),
    ("value_and_grad", "layerwise"),
    ("DistributedOptimizer", "auto"),
)


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((mlp(params, x) - y) ** 2)


def train(value_and_grad: Any, optimizer: Any, rows: slice) -> tuple[Any, list[float], int]:
    """The parameters after all steps, this rank's losses, and how often XLA compiled."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = layers(8, 16, 16, 3)
    state = jax.jit(optimizer.init)(params)
    losses = []
    for number in range(STEPS):
        x, y = data(ROWS, 8, seed=2 * number), data(ROWS, 3, seed=2 * number + 1)
        params, state, value = step(params, state, x[rows], y[rows])
        losses.append(value)
    return params, [float(v) for v in losses], step._cache_size()


def main() -> None:
    wfbp.init()
    rank, size = wfbp.rank(), wfbp.size()
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    optimizer = optax.chain(optax.trace(0.9), optax.scale(-0.3))
    wanted, wanted_losses, _ = train(jax.value_and_grad, optimizer, slice(None))
    rows = []
    for way, schedule in WAYS:
        if way == "value_and_grad":
            found = train(partial(wfbp.value_and_grad, schedule=schedule), optimizer, mine)
        else:
            wrapped = wfbp.DistributedOptimizer(optimizer, schedule=schedule)
            found = train(jax.value_and_grad, wrapped, mine)
        params, losses, num_compiled = found
        everybody = wfbp.allgather_object((jax.tree.map(np.asarray, params), losses))
        mean_losses = np.mean([theirs for _, theirs in everybody], axis=0)
        rows.append(
            {
                "way": way,
                "schedule": schedule,
                "difference": difference(params, wanted),
                "moved": difference(params, layers(8, 16, 16, 3)),
                "ranks_equal": all(difference(params, p) == 0 for p, _ in everybody),
                "losses": float(np.max(np.abs(mean_losses - wanted_losses))),
                "num_compiled": num_compiled,
            }
        )
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

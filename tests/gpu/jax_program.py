"""Two ranks on one GPU train with JAX as one process on the whole batch, by NCCL or staged.

Usage: mpirun -n 2 python tests/gpu/jax_program.py OUT NCCL|STAGED; writes OUT/rank<r>.json,
differences by what was trained.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # ranks share the memory

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import wfbp.jax as wfbp
from wfbp.config import Config
from wfbp.jax.exchanges import exchange_registry

SCHEDULES = ("auto", "layerwise", "oasr", "mgwfbp", "single", "threshold")
STEPS = 40
BATCH = 16


def parameters() -> Any:
    rng = np.random.default_rng(3)
    return {
        f"layer{k}": {
            "w": jnp.asarray(rng.normal(size=(a, b)) / np.sqrt(a), jnp.float32),
            "b": jnp.zeros(b, jnp.float32),
        }
        for k, (a, b) in enumerate([(17, 33), (33, 33), (33, 5)])
    }


def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    return jnp.mean((x - y) ** 2)


def train(value_and_grad: Any, optimizer: Any, rows: slice, jit: bool = True) -> Any:
    """The parameters after all steps; steps are enqueued ahead of the device."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, grads = value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    if jit:
        step = jax.jit(step, donate_argnums=(0, 1))
    params = parameters()
    state = optimizer.init(params)
    for number in range(STEPS if jit else 3):
        rng = np.random.default_rng(number)
        x = rng.normal(size=(BATCH * wfbp.size(), 17)).astype(np.float32)
        params, state, _ = step(params, state, x[rows], np.square(x[rows, :5]))
    return params


def difference(found: Any, wanted: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def main() -> None:
    out, library = sys.argv[1:]
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    if library == "NCCL":  # or the ranks would be seen to share the GPU, and staged
        os.environ["NCCL_HOSTID"] = f"wfbp-test-{MPI.COMM_WORLD.rank}"
    jax.config.update("jax_cuda_visible_devices", "0")
    jax.config.update("jax_default_matmul_precision", "highest")
    wfbp.init(config=Config(warmup_steps=1, profile_steps=2, trial_steps=1, probe_budget_s=0.1))
    rank = wfbp.rank()
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    adam = optax.adam(1e-2, eps=1e-4)
    found = {}
    wanted = train(jax.value_and_grad, adam, slice(None))
    for schedule in SCHEDULES:
        averaging = partial(wfbp.value_and_grad, schedule=schedule, threshold_bytes=500)
        found[schedule] = difference(train(averaging, adam, mine), wanted)
    wrapped = wfbp.DistributedOptimizer(adam)
    found["optimizer"] = difference(train(jax.value_and_grad, wrapped, mine), wanted)
    wanted = train(jax.value_and_grad, adam, slice(None), jit=False)
    found["without jit"] = difference(train(wfbp.value_and_grad, adam, mine, jit=False), wanted)
    device = exchange_registry().device
    assert device is not None, f"JAX runs on {jax.default_backend()}"
    Path(out, f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()

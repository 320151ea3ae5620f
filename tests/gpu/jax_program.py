"""Ranks on one GPU train with JAX as one process on the whole batch, by NCCL or staged.

Usage: mpirun -n 2 python -m tests.gpu.jax_program ..., as in ``place.py``; writes
OUT/rank<r>.json, differences by what was trained.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # ranks share the memory
if "--software" in sys.argv:  # most of the time is XLA's
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import wfbp.jax as wfbp
from tests.gpu import place
from wfbp.jax import gradient_exchange, xla_handlers
from wfbp.jax.xla_device import GpuPrograms

SCHEDULES = ("auto", "layerwise", "oasr", "mgwfbp", "single", "threshold")
STEPS = 24
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


def use_software(library: str) -> None:
    """Let JAX compute on the CPU, and call the handlers that are for CUDA."""
    from tests.support.software_xla import SoftwareXla, stand_in

    device, module = place.software_device(SoftwareXla, library), stand_in()
    xla_handlers._built = lambda: module
    gradient_exchange.find_programs = lambda handlers: GpuPrograms(handlers, device)


def main() -> None:
    options = place.options(SCHEDULES)
    if options.software:
        use_software(options.library)
    else:
        jax.config.update("jax_cuda_visible_devices", "0")
    jax.config.update("jax_default_matmul_precision", "highest")
    wfbp.init(config=place.CONFIG)
    rank = wfbp.rank()
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    adam = optax.adam(1e-2, eps=1e-4)
    found = {}
    wanted = train(jax.value_and_grad, adam, slice(None))
    for schedule in options.schedules:
        averaging = partial(wfbp.value_and_grad, schedule=schedule, threshold_bytes=500)
        found[schedule] = difference(train(averaging, adam, mine), wanted)
    wrapped = wfbp.DistributedOptimizer(adam)
    found["optimizer"] = difference(train(jax.value_and_grad, wrapped, mine), wanted)
    wanted = train(jax.value_and_grad, adam, slice(None), jit=False)
    found["without jit"] = difference(train(wfbp.value_and_grad, adam, mine, jit=False), wanted)
    assert gradient_exchange.exchange_registry().programs.name.startswith("GPU"), (
        jax.default_backend()
    )
    place.conclude(options.out, options.library, found)


if __name__ == "__main__":
    main()

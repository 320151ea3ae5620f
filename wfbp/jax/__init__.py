"""wfbp for JAX, under Horovod's names.

Example:
    >>> import jax, jax.numpy as jnp, optax, wfbp.jax as wfbp
    >>> wfbp.init()
    >>> params = {"w": jnp.ones(2)}
    >>> optimizer = optax.adam(0.1)
    >>> state = optimizer.init(params)
    >>> @jax.jit
    ... def step(params, state, x):
    ...     loss, grads = wfbp.value_and_grad(lambda p: jnp.sum(p["w"] * x))(params)
    ...     updates, state = optimizer.update(grads, state)
    ...     return optax.apply_updates(params, updates), state, loss
    >>> params, state, loss = step(params, state, jnp.ones(2))
"""

from __future__ import annotations

import sys

try:
    import jax  # noqa: F401
except ImportError as _error:
    # Compared as a tuple: a type checker would skip the rest of the file for Python 3.10.
    _old = tuple(sys.version_info[:2]) < (3, 11)
    _reason = "JAX 0.10 needs Python 3.11 or newer" if _old else "pip install 'wfbp[jax]'"
    raise ImportError(
        f"wfbp.jax needs JAX, which cannot be imported ({_error}): {_reason}. This is Python "
        f"{sys.version.split()[0]}; wfbp, wfbp.torch and wfbp.horovod work without JAX"
    ) from _error

from wfbp.core.types import Op
from wfbp.jax.collective_primitive import allgather, allreduce, alltoall, broadcast, reducescatter
from wfbp.jax.gradient_exchange import report
from wfbp.jax.gradients import DistributedOptimizer, grad, value_and_grad
from wfbp.jax.trees import (
    allgather_object,
    average_metrics,
    barrier,
    broadcast_object,
    broadcast_parameters,
)
from wfbp.jax.xla_device import set_local_device
from wfbp.runtime.collectives.api import init
from wfbp.runtime.process import is_initialized, local_rank, local_size, rank, shutdown, size

Average = Op.AVERAGE
Sum = Op.SUM
Min = Op.MIN
Max = Op.MAX
Product = Op.PRODUCT

__all__ = [
    "Average",
    "DistributedOptimizer",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "average_metrics",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "grad",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "report",
    "set_local_device",
    "shutdown",
    "size",
    "value_and_grad",
]

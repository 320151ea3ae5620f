"""Collectives in the order of the program: operations under way come first, on every rank.

JAX returns from a compiled function before it has run. The step may still have to exchange
gradients, and ranks to agree on plans; later collectives must not come in between.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import numpy as np

from wfbp.runtime.collectives import api

P = ParamSpec("P")
T = TypeVar("T")


def wait_for_programs() -> None:
    """Wait for what programs that this thread has called exchange with other ranks."""
    jax.effects_barrier()
    wait_for_steps()


def wait_for_steps() -> None:
    """Wait for the programs that this thread has called.

    XLA runs a thread's programs one after another, so all have run when one more has.
    """
    with jax.ensure_compile_time_eval():
        jax.block_until_ready(jax.jit(jax.numpy.negative)(np.float32(0)))


def _after_programs(operation: Callable[P, T]) -> Callable[P, T]:
    """The operation, run after the programs under way."""

    @functools.wraps(operation)
    def act(*args: P.args, **kwargs: P.kwargs) -> T:
        wait_for_programs()
        return operation(*args, **kwargs)

    return act


allgather_object = _after_programs(api.allgather_object)
broadcast_object = _after_programs(api.broadcast_object)
barrier = _after_programs(api.barrier)

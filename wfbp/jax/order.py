"""Collectives in the order of the program: what is under way comes first, on every rank.

JAX returns from a compiled function before it has run. The step may still have to exchange
gradients, and ranks to agree upon plans: what a rank does next must not come in between.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from wfbp.runtime import operations


def settle() -> None:
    """Wait for what programs that this thread has called exchange with other ranks."""
    jax.effects_barrier()
    see_steps_through()


def see_steps_through() -> None:
    """Wait for the programs that this thread has called.

    XLA runs a thread's programs one after another, so all have run when one more has.
    """
    with jax.ensure_compile_time_eval():
        jax.block_until_ready(jax.jit(jax.numpy.negative)(np.float32(0)))


def allgather_object(value: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, in rank order; any object that can be pickled.

    Example:
        >>> import wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.allgather_object("me") == ["me"] * wfbp.size()
        True
    """
    settle()
    return operations.allgather_object(value, name)


def broadcast_object(value: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object, on every rank; any object that can be pickled.

    Args:
        value: looked at on the root only.
        root_rank: whose object everybody gets.
        name: for messages.

    Example:
        >>> import wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast_object({"epoch": 3}, root_rank=0)
        {'epoch': 3}
    """
    settle()
    return operations.broadcast_object(value, root_rank, name)


def barrier() -> None:
    """Wait until every rank has come here, and its steps are over."""
    settle()
    operations.barrier()

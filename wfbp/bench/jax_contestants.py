"""The contestants of the JAX benchmark: each exchanges gradients in its own way.

All run the same step (forward, backward, exchange, update with momentum) in the same processes,
as few compiled programs as their way of exchanging allows, with donated parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mpi4py import MPI

import wfbp.jax as wfbp
from wfbp.bench.jax_models import Batch, JaxModel, Params

MOMENTUM = 0.9

NO_COMMUNICATION = "none"
FLAT = "mpi-flat"
GLOO = "gloo-psum"
MPI4JAX = ("mpi4jax-per-leaf", "mpi4jax-flat")
SCHEDULES = ("auto", "oasr", "mgwfbp", "wfbp", "single", "threshold")

Grad = Callable[[Params, Batch], tuple[Any, Params]]
Update = Callable[[Params, Params, Params, Any], tuple[Params, Params]]


def update(params: Params, velocity: Params, gradients: Params, rate: Any) -> tuple[Params, Params]:
    """Gradient descent with momentum."""
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity


class Contestant:
    """One model with one way to exchange its gradients; the base does not.

    Args:
        name: as in :data:`CONTESTANTS`.
        model: what is trained.
    """

    def __init__(self, name: str, model: JaxModel) -> None:
        self.name = name
        self.model = model
        self.rate = 0.0
        self.params: Params = None
        self.velocity: Params = None
        self._compiled = self.compile()

    def gradients(self, params: Params, batch: Batch) -> Params:
        """What the update gets; within the compiled step."""
        return jax.grad(self.model.loss)(params, batch)

    def compile(self) -> Callable[..., tuple[Params, Params]]:
        """The step as a function of parameters, velocity, batch and learning rate."""

        def step(
            params: Params, velocity: Params, batch: Batch, rate: Any
        ) -> tuple[Params, Params]:
            return update(params, velocity, self.gradients(params, batch), rate)

        return jax.jit(step, donate_argnums=(0, 1))

    def step(self, batch: Batch) -> None:
        """One training iteration, until its results are there."""
        self.params, self.velocity = self._compiled(self.params, self.velocity, batch, self.rate)
        jax.block_until_ready(self.params)

    def reset(self, params: Params, learning_rate: float) -> None:
        """Start from a copy of these parameters, without momentum."""
        self.params = jax.tree.map(jnp.copy, params)
        self.velocity = jax.tree.map(jnp.zeros_like, params)
        self.rate = learning_rate

    def vector(self) -> np.ndarray[Any, Any]:
        """All parameters in one vector."""
        return np.concatenate([np.asarray(p).reshape(-1) for p in jax.tree.leaves(self.params)])

    def report(self) -> dict[str, Any]:
        """What the contestant knows of itself."""
        return {}

    def settled(self) -> bool:
        """Whether the contestant has stopped choosing how to communicate."""
        return True

    def rest(self) -> None:
        """Leave nothing under way: each step waits for its results."""


class MpiFlat(Contestant):
    """All gradients in one vector, one blocking all-reduce between two compiled programs."""

    def compile(self) -> Callable[..., tuple[Params, Params]]:
        _, unravel = ravel_pytree(self.model.build(0))
        first = jax.jit(lambda params, batch: ravel_pytree(self.gradients(params, batch))[0])

        @partial(jax.jit, donate_argnums=(0, 1))
        def second(params: Params, velocity: Params, flat: jax.Array, rate: Any) -> Any:
            return update(params, velocity, unravel(flat), rate)

        def step(params: Params, velocity: Params, batch: Batch, rate: Any) -> Any:
            flat = np.array(first(params, batch))
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat)
            flat /= MPI.COMM_WORLD.size
            return second(params, velocity, flat, rate)

        return step


class Mpi4jax(Contestant):
    """mpi4jax's all-reduce within the compiled step, behind backward."""

    def gradients(self, params: Params, batch: Batch) -> Params:
        import mpi4jax

        def mean(x: jax.Array) -> jax.Array:
            total: jax.Array = mpi4jax.allreduce(x, op=MPI.SUM, comm=MPI.COMM_WORLD)
            return total / MPI.COMM_WORLD.size

        found = super().gradients(params, batch)
        if self.name.endswith("per-leaf"):
            return jax.tree.map(mean, found)
        flat, unravel = ravel_pytree(found)
        return unravel(mean(flat))


class Gloo(Contestant):
    """JAX's own collectives between processes: shard_map over all devices, and psum."""

    def compile(self) -> Callable[..., tuple[Params, Params]]:
        self._mesh = Mesh(np.array(jax.devices()), ("rank",))
        self._global: dict[int, Batch] = {}
        everywhere, by_rank = PartitionSpec(), PartitionSpec("rank")

        def step(
            params: Params, velocity: Params, batch: Batch, rate: Any
        ) -> tuple[Params, Params]:
            mean = jax.lax.pmean(self.gradients(params, batch), "rank")
            return update(params, velocity, mean, rate)

        mapped = jax.shard_map(
            step,
            mesh=self._mesh,
            in_specs=(everywhere, everywhere, by_rank, everywhere),
            out_specs=(everywhere, everywhere),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=(0, 1))

    def step(self, batch: Batch) -> None:
        """As the others', on a batch that is made global once."""
        if id(batch) not in self._global:
            self._global[id(batch)] = jax.tree.map(partial(self._place, "rank"), batch)
        super().step(self._global[id(batch)])

    def reset(self, params: Params, learning_rate: float) -> None:
        """The same parameters on all devices."""
        self.params = jax.tree.map(partial(self._place, None), params)
        self.velocity = jax.tree.map(jnp.zeros_like, self.params)
        self.rate = learning_rate

    def _place(self, axis: str | None, array: jax.Array) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec(axis) if axis else PartitionSpec())
        placed: jax.Array = jax.make_array_from_process_local_data(sharding, np.asarray(array))
        return placed


class Wfbp(Contestant):
    """wfbp with the schedule that its name ends with."""

    def gradients(self, params: Params, batch: Batch) -> Params:
        schedule = self.name.removeprefix("wfbp-")
        return wfbp.grad(self.model.loss, schedule=schedule, name=self._exchange)(params, batch)

    @property
    def _exchange(self) -> str:
        return f"{self.model.name} {self.name}"

    def report(self) -> dict[str, Any]:
        """The plan in use and what it costs."""
        return wfbp.report().get(self._exchange, {})

    def settled(self) -> bool:
        return self.report().get("phase") == "installed"


CONTESTANTS: dict[str, type[Contestant]] = {
    NO_COMMUNICATION: Contestant,
    FLAT: MpiFlat,
    **(dict.fromkeys(MPI4JAX, Mpi4jax) if find_spec("mpi4jax") else {}),
    GLOO: Gloo,
    **{f"wfbp-{schedule}": Wfbp for schedule in SCHEDULES},
}
"""What can compete here, by name; the order is that of the tables."""

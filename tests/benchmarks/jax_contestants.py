"""The contestants of the JAX benchmark: each exchanges gradients in its own way.

All run the same step (forward, backward, exchange, update with momentum) in the same processes,
as few compiled programs as their way of exchanging allows, with donated parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

Params = Any
Batch = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class JaxModel:
    """A model to train and the data to train it on.

    Args:
        name: key of :data:`MODELS`.
        title: for tables.
        build: makes parameters from a seed.
        predict: scores of every class, from parameters and a batch's first part.
        batch: makes one batch of (input, classes) from a seed.
    """

    name: str
    title: str
    build: Callable[[int], Params]
    predict: Callable[[Params, jax.Array], jax.Array]
    batch: Callable[[int], Batch]

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Mean cross-entropy over every position of the output."""
        data, classes = batch
        scores = jax.nn.log_softmax(self.predict(params, data))
        mean: jax.Array = -jnp.take_along_axis(scores, classes[..., None], -1).mean()
        return mean


def mlp(seed: int, depth: int = 60, width: int = 256) -> Params:
    """``depth`` square layers, initialised to keep the signal."""
    draw, scale = np.random.default_rng(seed), (2 / width) ** 0.5
    return [
        {"weight": _float32(draw.normal(0, scale, (width, width))), "bias": _zeros(width)}
        for _ in range(depth)
    ]


def _mlp_scores(params: Params, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    scores: jax.Array = x @ params[-1]["weight"] + params[-1]["bias"]
    return scores


def gpt(seed: int, depth: int = 12, width: int = 384, time: int = 128, vocab: int = 8192) -> Params:
    """Decoder-only transformer; input and output embeddings are separate."""
    draw = np.random.default_rng(seed)

    def matrix(*shape: int) -> jax.Array:
        return _float32(draw.normal(0, 0.02, shape))

    def linear(rows: int, columns: int) -> dict[str, jax.Array]:
        return {"weight": matrix(rows, columns), "bias": _zeros(columns)}

    def norm() -> dict[str, jax.Array]:
        return {"scale": _zeros(width) + 1, "bias": _zeros(width)}

    blocks = [
        {
            "norm1": norm(),
            "qkv": linear(width, 3 * width),
            "project": linear(width, width),
            "norm2": norm(),
            "up": linear(width, 4 * width),
            "down": linear(4 * width, width),
        }
        for _ in range(depth)
    ]
    embeddings = {"token": matrix(vocab, width), "position": matrix(time, width)}
    return {**embeddings, "blocks": blocks, "norm": norm(), "head": matrix(width, vocab)}


def _float32(values: Any) -> jax.Array:
    return jnp.asarray(np.asarray(values, np.float32))


def _zeros(count: int) -> jax.Array:
    return _float32(np.zeros(count))


def _linear(layer: Params, x: jax.Array) -> jax.Array:
    made: jax.Array = x @ layer["weight"] + layer["bias"]
    return made


def _norm(layer: Params, x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    spread = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    made: jax.Array = centred * spread * layer["scale"] + layer["bias"]
    return made


def _block(layer: Params, x: jax.Array, heads: int = 6) -> jax.Array:
    batch, time, width = x.shape
    qkv = _linear(layer["qkv"], _norm(layer["norm1"], x))
    q, k, v = qkv.reshape(batch, time, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) / (width // heads) ** 0.5
    seen = jnp.tril(jnp.ones((time, time), bool))
    mixed = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ v
    x = x + _linear(layer["project"], mixed.swapaxes(1, 2).reshape(batch, time, width))
    return x + _linear(layer["down"], jax.nn.gelu(_linear(layer["up"], _norm(layer["norm2"], x))))


def _gpt_scores(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["token"][tokens] + params["position"]
    for layer in params["blocks"]:
        x = _block(layer, x)
    scores: jax.Array = _norm(params["norm"], x) @ params["head"]
    return scores


def _vectors(seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    return _float32(draw.normal(size=(32, 256))), jnp.asarray(draw.integers(0, 256, 32, np.int32))


def _tokens(seed: int) -> Batch:
    text = np.random.default_rng(seed).integers(0, 8192, (4, 129), np.int32)
    return jnp.asarray(text[:, :-1]), jnp.asarray(text[:, 1:])


MODELS: dict[str, JaxModel] = {
    model.name: model
    for model in (
        JaxModel("mlp", "MLP 60 x 256, batch 32", mlp, _mlp_scores, _vectors),
        JaxModel(
            "gpt",
            "GPT 12 x 384, T 128, vocab 8192 untied, batch 4",
            gpt,
            _gpt_scores,
            _tokens,
        ),
    )
}
"""The benchmark's models by name."""


MOMENTUM = 0.9

NO_COMMUNICATION = "none"
FLAT = "mpi-flat"
GLOO = "gloo-psum"
MPI4JAX = ("mpi4jax-per-leaf", "mpi4jax-flat")
SCHEDULES = ("auto", "oasr", "mgwfbp", "layerwise", "single", "threshold")
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
    """mpi4jax's all-reduce within the compiled step, after backward."""

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

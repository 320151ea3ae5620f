"""Two of the training benchmark's models in plain JAX, of the same sizes, on synthetic data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Params = Any
Batch = tuple[jax.Array, jax.Array]


@dataclass(frozen=True, slots=True)
class JaxModel:
    """A model to train and the data to train it on.

    Args:
        name: key of :data:`MODELS`.
        title: for tables.
        build: makes parameters from a key.
        predict: scores of every class, from parameters and a batch's first part.
        batch: makes one batch of (input, classes) from a key.
    """

    name: str
    title: str
    build: Callable[[jax.Array], Params]
    predict: Callable[[Params, jax.Array], jax.Array]
    batch: Callable[[jax.Array], Batch]

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Mean cross-entropy over every position of the output."""
        data, classes = batch
        scores = jax.nn.log_softmax(self.predict(params, data))
        mean: jax.Array = -jnp.take_along_axis(scores, classes[..., None], -1).mean()
        return mean


def mlp(key: jax.Array, depth: int = 60, width: int = 256) -> Params:
    """``depth`` square layers, initialised to keep the signal."""
    scale = (2 / width) ** 0.5
    return [
        {"weight": jax.random.normal(k, (width, width)) * scale, "bias": jnp.zeros(width)}
        for k in jax.random.split(key, depth)
    ]


def _mlp_scores(params: Params, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    scores: jax.Array = x @ params[-1]["weight"] + params[-1]["bias"]
    return scores


def gpt(
    key: jax.Array, depth: int = 12, width: int = 384, time: int = 128, vocab: int = 8192
) -> Params:
    """Decoder-only transformer; input and output embeddings are separate."""
    keys = iter(jax.random.split(key, 4 * depth + 3))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * 0.02

    def linear(rows: int, columns: int) -> dict[str, jax.Array]:
        return {"weight": matrix(rows, columns), "bias": jnp.zeros(columns)}

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

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


def _vectors(key: jax.Array) -> Batch:
    first, second = jax.random.split(key)
    return jax.random.normal(first, (32, 256)), jax.random.randint(second, (32,), 0, 256)


def _tokens(key: jax.Array) -> Batch:
    text = jax.random.randint(key, (4, 129), 0, 8192)
    return text[:, :-1], text[:, 1:]


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

"""Two of the training benchmark's models in plain JAX, of the same sizes, on synthetic data.

Random numbers are NumPy's: JAX would compile for longer than the benchmark runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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

"""Train a small character-level GPT on the source code of Python's standard library, with Flax.

    pip install -e ".[mpich,jax]" flax
    wfbprun -n 2 examples/jax_transformer.py

The lines that make it data-parallel are marked with an arrow; all else is plain JAX, Flax and
optax.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from rich.console import Console
from rich.table import Table

import wfbp.jax as wfbp  # <-


def library_text(max_bytes: int) -> str:
    """The modules of the running Python's standard library, one after another."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return "".join(c for c in text[:max_bytes] if c == "\n" or (c.isascii() and c.isprintable()))


class Block(nn.Module):
    """Causal attention and a two-layer network, each added to its normalised input."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        qkv = nn.Dense(3 * width)(nn.LayerNorm()(x)).reshape(batch, time, 3, self.heads, -1)
        mixed = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
        )
        x = x + nn.Dense(width)(mixed.reshape(batch, time, width))
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    """Predicts the next character at every position."""

    vocab: int
    width: int
    depth: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        position = self.param("position", nn.initializers.normal(), (tokens.shape[1], self.width))
        x = nn.Embed(self.vocab, self.width)(tokens) + position
        for _ in range(self.depth):
            x = Block(self.heads)(x)
        return nn.Dense(self.vocab, use_bias=False)(nn.LayerNorm()(x))


def main() -> None:
    options = arguments()
    wfbp.init()  # <-
    text = library_text(options.max_bytes)
    characters = {c: i for i, c in enumerate(sorted(set(text)))}
    tokens = np.array([characters[c] for c in text], np.int32)
    tokens = np.array_split(tokens, wfbp.size())[wfbp.rank()]  # <- each rank reads its own part

    model = GPT(len(characters), options.width, options.depth, heads=4)
    params = model.init(jax.random.key(0), jnp.zeros((1, options.context), jnp.int32))
    params = wfbp.broadcast_parameters(params, root_rank=0)  # <-
    optimizer = optax.adamw(optax.cosine_onecycle_schedule(options.steps + 1, options.lr))
    optimizer = wfbp.DistributedOptimizer(optimizer, schedule=options.schedule)  # <-
    state = optimizer.init(params)

    def loss_of(params: dict, batch: jax.Array) -> jax.Array:
        logits = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    @jax.jit
    def step(params: dict, state: optax.OptState, batch: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    random = np.random.default_rng(wfbp.rank())
    window = np.arange(options.context + 1)
    losses: list[float] = []
    start = 0.0
    for number in range(options.steps):
        starts = random.integers(len(tokens) - len(window), size=(options.batch, 1))
        params, state, loss = step(params, state, tokens[starts + window])
        if number % 10 == 0 or number == options.steps - 1:
            losses.append(float(wfbp.average_metrics(loss)))  # <- mean over ranks
            if wfbp.rank() == 0:
                print(f"step {number}: loss {losses[-1]:.3f}", flush=True)
        start = start or time.perf_counter()  # after the first step, which compiles
    seconds = time.perf_counter() - start
    sums = wfbp.allgather_object(checksum(params))
    if wfbp.rank() == 0:
        count = (options.steps - 1) * options.batch * options.context * wfbp.size()
        report = wfbp.report().get("DistributedOptimizer", {})
        Console().print(summary(losses, count / seconds, report))
        print("checksum on each rank:", *sums)


def checksum(params: dict) -> float:
    """The sum of all parameters' magnitudes, by which ranks can be compared."""
    return sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(params))


def summary(losses: list[float], tokens_per_s: float, report: dict) -> Table:
    """What was learnt, and how the gradients travelled."""

    def milliseconds(key: str) -> str:
        return "-" if report.get(key) is None else f"{report[key] * 1e3:.1f} ms"

    plan = "one rank: nothing to exchange"
    if report:
        groups = f"{report['num_groups']} group" + "s" * (report["num_groups"] != 1)
        overlap = "during backward" if report["overlap"] else "after backward"
        plan = f"{report['schedule']}: {groups} {overlap}"
    ratio = report.get("ratio_to_lower_bound")
    table = Table(title=f"GPT on the standard library, {wfbp.size()} ranks", show_header=False)
    table.add_row("loss", f"{losses[0]:.3f} -> {losses[-1]:.3f}")
    table.add_row("tokens/s", f"{tokens_per_s:,.0f}")
    table.add_row("plan", plan)
    table.add_row("gradient", f"{report.get('total_bytes', 0) / 1e6:.1f} MB per step")
    table.add_row("iteration, predicted", milliseconds("predicted_iteration_s"))
    table.add_row("iteration, measured", milliseconds("measured_iteration_s"))
    table.add_row("exposed communication", milliseconds("exposed_s"))
    table.add_row("T/LB", "-" if ratio is None else f"{ratio:.3f} times the lower bound")
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=12, help="windows per rank and step")
    parser.add_argument("--context", type=int, default=128, help="characters per window")
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="of text")
    parser.add_argument("--schedule", default="auto", help="how gradients are grouped")
    return parser.parse_args()


if __name__ == "__main__":
    main()

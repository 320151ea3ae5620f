"""Train an Equinox model on the handwritten digits that scikit-learn ships.

    pip install -e ".[mpich,jax,examples]" equinox
    wfbprun -n 2 examples/jax_equinox.py

The global batch is the same for any number of ranks, and so is the run, up to rounding.
"""

from __future__ import annotations

import argparse

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import wfbp.jax as wfbp


def loss_of(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


def main() -> None:
    options = arguments()
    wfbp.init()
    data = load_digits()
    x, y = data.data.astype(np.float32) / 16, data.target

    model = eqx.nn.MLP(64, 10, 128, depth=2, key=jax.random.key(wfbp.rank()))
    model = wfbp.broadcast_parameters(model, root_rank=0)
    optimizer = wfbp.DistributedOptimizer(optax.adam(1e-3))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: eqx.nn.MLP, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, x, y)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    random = np.random.default_rng(0)  # the same on all ranks
    mine = slice(wfbp.rank(), None, wfbp.size())  # of every batch
    for number in range(options.steps):
        part = random.integers(len(x), size=options.batch)[mine]
        model, state, loss = step(model, state, x[part], y[part])
        if (number + 1) % 50 == 0:
            mean = wfbp.average_metrics(loss)
            if wfbp.rank() == 0:
                print(f"step {number + 1}: loss {mean:.3f}")
    sums = wfbp.allgather_object(checksum(model))
    if wfbp.rank() == 0:
        print("checksum on each rank:", *sums)


def checksum(model: eqx.nn.MLP) -> float:
    """The sum of all parameters' magnitudes, by which ranks and runs can be compared."""
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    return sum(float(abs(leaf).sum()) for leaf in leaves)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Train a Flax NNX model on the handwritten digits that scikit-learn ships.

    pip install -e ".[mpich,jax,examples]" flax
    wfbprun -n 2 examples/jax_flax_nnx.py

The global batch is the same for any number of ranks, and so is the run, up to rounding.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import wfbp.jax as wfbp


class Network(nnx.Module):
    """Three linear layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.second = nnx.Linear(128, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss_of(model: Network, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def step(model: Network, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """One step of training; model and optimizer are changed in place, as NNX does it."""
    loss, gradients = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, gradients)
    return loss


def main() -> None:
    options = arguments()
    wfbp.init()
    data = load_digits()
    x, y = data.data.astype(np.float32) / 16, data.target

    model = Network(nnx.Rngs(wfbp.rank()))
    nnx.update(model, wfbp.broadcast_parameters(nnx.state(model), root_rank=0))
    transformation = wfbp.DistributedOptimizer(optax.adam(1e-3))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    random = np.random.default_rng(0)  # the same on all ranks
    mine = slice(wfbp.rank(), None, wfbp.size())  # of every batch
    for number in range(options.steps):
        part = random.integers(len(x), size=options.batch)[mine]
        loss = step(model, optimizer, x[part], y[part])
        if (number + 1) % 50 == 0:
            mean = wfbp.average_metrics(loss)
            if wfbp.rank() == 0:
                print(f"step {number + 1}: loss {mean:.3f}")
    sums = wfbp.allgather_object(checksum(model))
    if wfbp.rank() == 0:
        print("checksum on each rank:", *sums)


def checksum(model: Network) -> float:
    """The sum of all parameters' magnitudes, by which ranks and runs can be compared."""
    return sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks")
    return parser.parse_args()


if __name__ == "__main__":
    main()

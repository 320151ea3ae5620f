"""Train a Flax Linen model on the handwritten digits that scikit-learn ships.

    pip install -e ".[mpich,jax,examples]" flax
    wfbprun -n 2 examples/jax_flax_linen.py

The global batch is the same for any number of ranks, and so is the run, up to rounding.
"""

from __future__ import annotations

import argparse

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import wfbp.jax as wfbp


class Network(nn.Module):
    """A convolution and two linear layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(x[..., None]))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


@jax.jit
def step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step of training, with gradients averaged over all ranks."""

    def loss_of(params: dict) -> jax.Array:
        scores = state.apply_fn(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()

    loss, gradients = wfbp.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def main() -> None:
    options = arguments()
    wfbp.init()
    data = load_digits()
    x, y = data.images.astype(np.float32) / 16, data.target

    model = Network()
    params = model.init(jax.random.key(wfbp.rank()), x[:1])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    state = wfbp.broadcast_parameters(state, root_rank=0)

    random = np.random.default_rng(0)  # the same on all ranks
    mine = slice(wfbp.rank(), None, wfbp.size())  # of every batch
    for number in range(options.steps):
        part = random.integers(len(x), size=options.batch)[mine]
        state, loss = step(state, x[part], y[part])
        if (number + 1) % 50 == 0:
            mean = wfbp.average_metrics(loss)
            if wfbp.rank() == 0:
                print(f"step {number + 1}: loss {mean:.3f}")
    sums = wfbp.allgather_object(checksum(state.params))
    if wfbp.rank() == 0:
        print("checksum on each rank:", *sums)


def checksum(params: dict) -> float:
    """The sum of all parameters' magnitudes, by which ranks and runs can be compared."""
    return sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(params))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks")
    return parser.parse_args()


if __name__ == "__main__":
    main()

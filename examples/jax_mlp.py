"""Train a small network on the handwritten digits that scikit-learn ships, in plain JAX.

    pip install -e ".[mpich,jax,examples]"
    wfbprun -n 2 examples/jax_mlp.py

The global batch is the same for any number of ranks, so every run follows the same trajectory up
to rounding, whatever the number of ranks and the schedule.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import wfbp.jax as wfbp

Params = list[dict[str, jax.Array]]


def digits() -> list[np.ndarray]:
    """Images (n, 64) from 0 to 1 and classes: training images, test images, then their classes."""
    data = load_digits()
    images, classes = (data.data / 16).astype(np.float32), data.target.astype(np.int32)
    return train_test_split(images, classes, test_size=0.2, random_state=0, stratify=classes)


def network(key: jax.Array, widths: tuple[int, ...] = (64, 256, 128, 10)) -> Params:
    """Weights and biases of each layer."""
    sizes = list(pairwise(widths))
    return [
        {"weight": jax.random.normal(k, (n, m)) * jnp.sqrt(2 / n), "bias": jnp.zeros(m)}
        for k, (n, m) in zip(jax.random.split(key, len(sizes)), sizes, strict=True)
    ]


def predict(params: Params, x: jax.Array) -> jax.Array:
    """A score for every class."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
    return x @ params[-1]["weight"] + params[-1]["bias"]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()


def main() -> None:
    options = arguments()
    wfbp.init()
    train_x, test_x, train_y, test_y = digits()

    # Each rank takes an equal part of every global batch, so the mean of the ranks' gradients is
    # the gradient of the whole batch.
    if options.batch % wfbp.size():
        raise SystemExit(f"--batch {options.batch} does not divide into {wfbp.size()} ranks")
    steps = len(train_x) // options.batch
    optimizer = optax.sgd(optax.cosine_decay_schedule(0.1, options.epochs * steps), momentum=0.9)
    params = wfbp.broadcast_parameters(network(jax.random.key(wfbp.rank())), root_rank=0)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Params, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        value, gradients = wfbp.value_and_grad(loss, schedule=options.schedule)(params, x, y)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def accuracy(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        right = (predict(params, x).argmax(1) == y).sum()
        return wfbp.allreduce(right, op=wfbp.Sum) / len(test_y)

    mine = slice(wfbp.rank(), None, wfbp.size())  # of the test images
    shuffle = np.random.default_rng(0)  # the same on all ranks
    for epoch in range(options.epochs):
        batches = shuffle.permutation(len(train_x))[: steps * options.batch].reshape(steps, -1)
        for batch in batches:
            part = batch[mine]
            params, state, value = step(params, state, train_x[part], train_y[part])
        share = accuracy(params, test_x[mine], test_y[mine])
        value = wfbp.average_metrics(value)
        if wfbp.rank() == 0:
            print(f"epoch {epoch + 1}: loss {value:.3f}, test accuracy {share:.2%}")
    sums = wfbp.allgather_object(checksum(params))
    if wfbp.rank() == 0:
        print("checksum on each rank:", *sums)


def checksum(params: Params) -> float:
    """The sum of all parameters' magnitudes, by which ranks and runs can be compared."""
    return sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(params))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=48, help="images per step, over all ranks")
    parser.add_argument("--schedule", default="auto", help="how gradients are grouped")
    return parser.parse_args()


if __name__ == "__main__":
    main()

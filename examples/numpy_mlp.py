"""Train an MLP without any framework: NumPy, a backward pass by hand, and a GradientReducer.

    pip install -e ".[mpich,examples]"
    wfbprun -n 2 examples/numpy_mlp.py

Each gradient is handed over as soon as it exists; it travels while the next one is computed.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from threadpoolctl import threadpool_limits

import wfbp

Layers = list[tuple[np.ndarray, np.ndarray]]


def new_layers(sizes: list[int]) -> Layers:
    """Weights (inputs, outputs) and biases; the same on all ranks, from one seed."""
    random = np.random.default_rng(0)
    return [
        (
            random.normal(0, np.sqrt(2 / m), (m, n)).astype(np.float32),
            np.zeros(n, np.float32),
        )
        for m, n in pairwise(sizes)
    ]


def forward(layers: Layers, x: np.ndarray) -> list[np.ndarray]:
    """The input of every layer, and the output of the last."""
    values = [x]
    for weight, bias in layers[:-1]:
        values.append(np.maximum(values[-1] @ weight + bias, 0))
    weight, bias = layers[-1]
    return [*values, values[-1] @ weight + bias]


def backward(
    layers: Layers, values: list[np.ndarray], y: np.ndarray, reducer: wfbp.GradientReducer
) -> float:
    """Mean cross-entropy; announces each layer's gradients as they appear, last layer first."""
    logits = values[-1]
    share = np.exp(logits - logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(share[rows, y]).mean()
    delta = share
    delta[rows, y] -= 1
    delta /= len(y)
    for k in reversed(range(len(layers))):
        reducer.mark_ready(2 * k + 1, delta.sum(0))
        reducer.mark_ready(2 * k, values[k].T @ delta)
        if k:
            delta = (delta @ layers[k][0].T) * (values[k] > 0)
    return float(loss)


def main() -> None:
    options = arguments()
    wfbp.init()
    threadpool_limits(1)  # one thread for matrix products: the ranks share the cores
    data = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        (data.data / 16).astype(np.float32), data.target, test_size=0.2, random_state=0
    )
    layers = new_layers([64, 256, 128, 10])
    parameters = [array for layer in layers for array in layer]
    velocities = [np.zeros_like(array) for array in parameters]
    reducer = wfbp.GradientReducer(
        [(f"layer{i // 2}.{'bias' if i % 2 else 'weight'}", a) for i, a in enumerate(parameters)],
        schedule=options.schedule,
    )
    shuffle = np.random.default_rng(0)  # the same on all ranks
    mine = slice(wfbp.rank(), None, wfbp.size())
    for epoch in range(options.epochs):
        order = shuffle.permutation(len(train_x))
        for start in range(0, len(order) - options.batch + 1, options.batch):
            part = order[start : start + options.batch][mine]
            loss = backward(layers, forward(layers, train_x[part]), train_y[part], reducer)
            for array, velocity, gradient in zip(
                parameters, velocities, reducer.wait(), strict=True
            ):
                velocity *= 0.9
                velocity += gradient
                array -= options.lr * velocity
        answers = forward(layers, test_x[mine])[-1].argmax(1)
        right = wfbp.allreduce(np.array((answers == test_y[mine]).sum()), op=wfbp.Sum)
        if wfbp.rank() == 0:
            accuracy = int(right) / len(test_y)
            print(f"epoch {epoch + 1}: loss {loss:.3f}, test accuracy {accuracy:.2%}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=48, help="images per step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--schedule", default="auto", help="how gradients are grouped")
    return parser.parse_args()


if __name__ == "__main__":
    main()

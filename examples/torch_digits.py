"""Train a convolutional network on the handwritten digits that scikit-learn ships.

    pip install -e ".[mpich,torch,examples]"
    wfbprun -n 2 examples/torch_digits.py

The global batch is the same for any number of ranks, so every run follows the same trajectory up
to rounding, whatever the number of ranks and the schedule: test accuracies agree within 0.6
percentage points (two of the 360 test images).
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional

import wfbp.torch as wfbp


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 1, 8, 8) from 0 to 1 and classes, for training and for the test."""
    data = load_digits()
    split = train_test_split(
        data.images, data.target, test_size=0.2, random_state=0, stratify=data.target
    )
    train_x, test_x = (torch.tensor(x, dtype=torch.float32)[:, None] / 16 for x in split[:2])
    train_y, test_y = (torch.tensor(y) for y in split[2:])
    return train_x, train_y, test_x, test_y


def network() -> nn.Module:
    """Two convolutions and two linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )


def main() -> None:
    options = arguments()
    wfbp.init()
    torch.set_num_threads(1)
    train_x, train_y, test_x, test_y = digits()

    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wfbp.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), schedule=options.schedule
    )
    wfbp.broadcast_parameters(model.state_dict(), root_rank=0)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    # Each rank takes an equal part of every global batch, so the mean of the ranks' gradients is
    # the gradient of the whole batch.
    if options.batch % wfbp.size():
        raise SystemExit(f"--batch {options.batch} does not divide into {wfbp.size()} ranks")
    shuffle = torch.Generator().manual_seed(0)  # the same on all ranks
    for epoch in range(options.epochs):
        order = torch.randperm(len(train_x), generator=shuffle)
        for batch in order.split(options.batch)[:-1]:
            part = batch.chunk(wfbp.size())[wfbp.rank()]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(train_x[part]), train_y[part])
            loss.backward()
            optimizer.step()
        decay.step()
        accuracy = evaluate(model, test_x, test_y)
        if wfbp.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy:.2%}")


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of right answers; each rank looks at its part of the images."""
    mine = slice(wfbp.rank(), None, wfbp.size())
    right = (model(x[mine]).argmax(1) == y[mine]).sum()
    return wfbp.allreduce(right, op=wfbp.Sum).item() / len(y)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=48, help="images per step, over all ranks")
    parser.add_argument("--schedule", default="auto", help="how gradients are grouped")
    return parser.parse_args()


if __name__ == "__main__":
    main()

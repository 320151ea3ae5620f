"""Images that a network can learn: each class is bright in another place."""

from typing import Any

import torch


class _Images(torch.utils.data.TensorDataset):
    def __init__(self, number: int, shape: tuple[int, ...], classes: int) -> None:
        generator = torch.Generator().manual_seed(number)
        labels = torch.randint(classes, (number,), generator=generator)
        images = torch.randn(number, *shape, generator=generator)
        for image, label in zip(images, labels, strict=True):
            image[:, 2 * int(label) : 2 * int(label) + 4] += 2.0
        super().__init__(images, labels)


class MNIST(_Images):
    def __init__(self, root: str, train: bool = True, **options: Any) -> None:
        super().__init__(256 if train else 64, (1, 28, 28), 10)


class ImageFolder(_Images):
    def __init__(self, root: str, transform: Any = None) -> None:
        super().__init__(32, (3, 64, 64), 10)

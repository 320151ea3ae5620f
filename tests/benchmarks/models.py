"""Models in plain torch, with batches of synthetic data.

They differ in their tensors: many tiny ones (``MLP``), many of mixed size (``RESNET50``, ``GPT``),
few huge ones at the start of backward (``VGG16``). ``LSTM`` has few large ones that are ready late,
``DENSENET`` hundreds of small ones. No dropout, so that every contestant computes the same numbers
from the same state.

Each of them is a model for ``wfbp bench training --model tests.benchmarks.models:NAME``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of a model on a batch, over every position of its output."""
    data, classes = batch
    logits: Tensor = model(data)
    mean: Tensor = functional.cross_entropy(logits.flatten(0, -2), classes.flatten())
    return mean


class WithLoss(nn.Module):
    """A model whose result is its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, data: Tensor, classes: Tensor) -> Tensor:
        return loss(self.body, (data, classes))


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model to train and the data to train it on.

    Args:
        title: for tables.
        build: makes the model; random, seed before.
        batch: makes one batch of (input, classes) from a generator.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]

    def __call__(self) -> tuple[WithLoss, Callable[[int], Batch]]:
        """As ``wfbp bench training`` expects it: the loss, and a batch for each seed."""
        return WithLoss(self.build()), lambda seed: self.batch(torch.Generator().manual_seed(seed))


def mlp(depth: int = 60, width: int = 256) -> nn.Module:
    """``depth`` square linear layers with ReLU between them, initialised to keep the signal."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        linear = nn.Linear(width, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Bottleneck(nn.Module):
    """Residual block of 1x1, 3x3 and 1x1 convolutions (He et al. 2016, figure 5)."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels_in == out
            else nn.Sequential(
                nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Module:
    """ResNet-50 (He et al. 2016, table 1): 161 tensors, 25.6 M parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def vgg16(classes: int = 1000) -> nn.Module:
    """VGG-16 (Simonyan and Zisserman 2015, column D) for 64x64 images, without dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            convolution = nn.Conv2d(channels, width, 3, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(channels * 2 * 2, 4096), nn.ReLU()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, classes)]
    return nn.Sequential(*layers)


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        further: Tensor = x + self.mlp(self.norm2(x))
        return further


class Decoder(nn.Module):
    """Decoder-only transformer; input and output embeddings are separate tensors."""

    def __init__(
        self, depth: int = 12, width: int = 384, heads: int = 6, time: int = 128, vocab: int = 8192
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(time, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Recurrent(nn.Module):
    """Language model of two recurrent layers; their gradients are ready only after all steps."""

    def __init__(self, vocab: int = 4096, embedding: int = 256, width: int = 512) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, embedding)
        self.layers = nn.LSTM(embedding, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.layers(self.token(tokens))
        logits: Tensor = self.head(states)
        return logits


class DenseLayer(nn.Module):
    """What a dense block adds to its input (Huang et al. 2017, section 3)."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet121(classes: int = 1000, growth: int = 32) -> nn.Module:
    """DenseNet-121 (Huang et al. 2017, table 1): 364 tensors, 8.0 M parameters."""
    channels = 2 * growth
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    blocks = (6, 12, 24, 16)
    for block, length in enumerate(blocks):
        for _ in range(length):
            layers.append(DenseLayer(channels, growth))
            channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if block < len(blocks) - 1:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers)


def _vectors(generator: torch.Generator) -> Batch:
    return (
        torch.randn(32, 256, generator=generator),
        torch.randint(256, (32,), generator=generator),
    )


def images(count: int, edge: int) -> Callable[[torch.Generator], Batch]:
    """Makes batches of so many square images."""
    return lambda generator: (
        torch.randn(count, 3, edge, edge, generator=generator),
        torch.randint(1000, (count,), generator=generator),
    )


def tokens(vocab: int, count: int, time: int) -> Callable[[torch.Generator], Batch]:
    """Makes batches of so many texts, with the next token of each position."""

    def batch(generator: torch.Generator) -> Batch:
        text = torch.randint(vocab, (count, time + 1), generator=generator)
        return text[:, :-1], text[:, 1:]

    return batch


MLP = BenchModel("MLP 60 x 256, batch 32", mlp, _vectors)
RESNET50 = BenchModel("ResNet-50 64x64, batch 8", resnet50, images(8, 64))
GPT = BenchModel("GPT 12 x 384, T 128, vocab 8192 untied, batch 4", Decoder, tokens(8192, 4, 128))
VGG16 = BenchModel("VGG-16 64x64, FC 2048-4096-4096-1000, batch 4", vgg16, images(4, 64))
LSTM = BenchModel("LSTM 2 x 512, T 32, vocab 4096, batch 8", Recurrent, tokens(4096, 8, 32))
DENSENET = BenchModel("DenseNet-121 64x64, batch 4", densenet121, images(4, 64))
SMALL_GPT = BenchModel(
    "GPT 6 x 256, T 128, vocab 1024 untied, batch 4",
    lambda: Decoder(depth=6, width=256, heads=4, vocab=1024),
    tokens(1024, 4, 128),
)
"""Small enough that many measurements of it take minutes: 5.3 million parameters."""

MODELS = {
    "mlp": MLP,
    "resnet50": RESNET50,
    "gpt": GPT,
    "vgg16": VGG16,
    "lstm": LSTM,
    "densenet": DENSENET,
}
"""By the names of command lines."""

FURTHER_MODELS = ("lstm", "densenet")
"""Trained where they are asked for, and by the benchmark of regret."""

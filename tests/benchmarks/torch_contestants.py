"""Models in plain torch, with batches of synthetic data, and ways to exchange their gradients.

The models differ in what matters to communication: many tiny tensors (``mlp``), many of mixed size
(``resnet50``, ``gpt``), few huge ones at the start of backward (``vgg16``); and, in the benchmark
of regret alone, few large ones that are ready late (``lstm``), and hundreds of small ones
(``densenet``). No dropout, so that every contestant computes the same numbers from the same state.

All contestants run the same loop (forward, backward, exchange, update) in the same processes; one
is what it wraps around the model, what it does between backward and the update, or the optimizer
it puts in place of the plain one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional

from tests.benchmarks.harness import HALVES, NO_COMMUNICATION

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model to train and the data to train it on.

    Args:
        name: key of :data:`MODELS`.
        title: for tables.
        build: makes the model; random, seed before.
        batch: makes one batch of (input, classes) from a generator.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


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


class GPT(nn.Module):
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


class LSTM(nn.Module):
    """Language model of two recurrent layers; their gradients are ready only behind all steps."""

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


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of a model on a batch, over every position of its output."""
    data, classes = batch
    logits: Tensor = model(data)
    mean: Tensor = functional.cross_entropy(logits.flatten(0, -2), classes.flatten())
    return mean


def _vectors(generator: torch.Generator) -> Batch:
    return (
        torch.randn(32, 256, generator=generator),
        torch.randint(256, (32,), generator=generator),
    )


def _images(count: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        return (
            torch.randn(count, 3, 64, 64, generator=generator),
            torch.randint(1000, (count,), generator=generator),
        )

    return batch


def _tokens(vocab: int, count: int, time: int) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        text = torch.randint(vocab, (count, time + 1), generator=generator)
        return text[:, :-1], text[:, 1:]

    return batch


MODELS: dict[str, BenchModel] = {
    model.name: model
    for model in (
        BenchModel("mlp", "MLP 60 x 256, batch 32", mlp, _vectors),
        BenchModel("resnet50", "ResNet-50 64x64, batch 8", resnet50, _images(8)),
        BenchModel(
            "gpt", "GPT 12 x 384, T 128, vocab 8192 untied, batch 4", GPT, _tokens(8192, 4, 128)
        ),
        BenchModel("vgg16", "VGG-16 64x64, FC 2048-4096-4096-1000, batch 4", vgg16, _images(4)),
        BenchModel("lstm", "LSTM 2 x 512, T 32, vocab 4096, batch 8", LSTM, _tokens(4096, 8, 32)),
        BenchModel("densenet", "DenseNet-121 64x64, batch 4", densenet121, _images(4)),
    )
}
"""The benchmark's models by name."""

FURTHER_MODELS = ("lstm", "densenet")
"""Trained where they are asked for, and by the benchmark of regret."""


SCHEDULES = ("auto", "oasr", "mgwfbp", "layerwise", "single", "threshold", "hybrid")
FURTHER_SCHEDULES = ("independent", "dear", "ipart", "ps", "ps_layerwise")
"""Compete where they are asked to."""
DDP_BUCKETS_MB = (1, 25, 100)

PER_TENSOR = "mpi-per-tensor"
FLAT = "mpi-flat"


def _nothing() -> None:
    """What a contestant does after backward that exchanges nothing there."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One model with one way to exchange its gradients.

    Args:
        name: as in :data:`CONTESTANTS`.
        model: the plain model, whose parameters are compared.
        sgd: the plain optimizer, which holds the momentum.
        module: what is called in forward.
        optimizer: whose ``zero_grad`` and ``step`` are called.
        exchange: called between backward and step.
        report: what the contestant knows of itself.
    """

    name: str
    model: nn.Module
    sgd: torch.optim.SGD
    module: nn.Module
    optimizer: Any
    exchange: Callable[[], None] = _nothing
    report: Callable[[], dict[str, Any]] = dict

    def step(self, batch: Batch) -> None:
        """One training iteration."""
        self.optimizer.zero_grad()
        loss(self.module, batch).backward()  # type: ignore[no-untyped-call]
        self.exchange()
        self.optimizer.step()

    def reset(self, state: dict[str, Any], learning_rate: float) -> None:
        """Back to a model state, without momentum."""
        self.model.load_state_dict(state)
        self.sgd.state.clear()
        for group in self.sgd.param_groups:
            group["lr"] = learning_rate

    def settled(self) -> bool:
        """Whether the contestant has stopped choosing how to communicate."""
        return bool(self.report().get("phase", "installed") == "installed")

    def rest(self) -> None:
        """Give the memory of the gradients back while others run, and leave nothing under way."""
        self.optimizer.zero_grad()
        for _ in self.model.parameters():  # to read them is to wait for what still travels
            pass


Maker = Callable[[str, nn.Module, torch.optim.SGD], Contestant]


def _none(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    return Contestant(name, model, sgd, model, sgd)


def _mpi_per_tensor(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """One blocking all-reduce per gradient after backward, in place."""

    def exchange() -> None:
        for parameter in model.parameters():
            gradient = parameter.grad
            assert gradient is not None
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient.numpy())
            gradient.div_(MPI.COMM_WORLD.size)

    return Contestant(name, model, sgd, model, sgd, exchange)


def _mpi_flat(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
    """All gradients copied into one buffer, one blocking all-reduce, and copied back."""
    parameters = list(model.parameters())
    flat = torch.empty(sum(p.numel() for p in parameters))
    ends = accumulate(p.numel() for p in parameters)
    pieces = [
        flat[end - p.numel() : end].view_as(p) for end, p in zip(ends, parameters, strict=True)
    ]

    def exchange() -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_copy_(pieces, gradients)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
        flat.div_(MPI.COMM_WORLD.size)
        torch._foreach_copy_(gradients, pieces)

    return Contestant(name, model, sgd, model, sgd, exchange)


def _ddp(bucket_mb: int, half: str = "") -> Maker:
    def make(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
        # No other contestant exchanges the buffers of batch norm, so DDP need not either.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the option has two names over versions
            module = nn.parallel.DistributedDataParallel(
                model, bucket_cap_mb=bucket_mb, broadcast_buffers=False
            )
        if half:
            module.register_comm_hook(None, getattr(default_hooks, f"{half}_compress_hook"))
        return Contestant(name, model, sgd, module, sgd)

    return make


def _wfbp(schedule: str, half: str = "none") -> Maker:
    def make(name: str, model: nn.Module, sgd: torch.optim.SGD) -> Contestant:
        import wfbp.torch

        optimizer = wfbp.torch.DistributedOptimizer(
            sgd,
            named_parameters=model.named_parameters(),
            schedule=schedule,
            compression=getattr(wfbp.torch.Compression, half),
        )
        return Contestant(name, model, sgd, model, optimizer, report=optimizer.report)

    return make


CONTESTANTS: dict[str, Maker] = {
    NO_COMMUNICATION: _none,
    PER_TENSOR: _mpi_per_tensor,
    FLAT: _mpi_flat,
    **{f"ddp-{mb}": _ddp(mb) for mb in DDP_BUCKETS_MB},
    **{f"wfbp-{schedule}": _wfbp(schedule) for schedule in (*SCHEDULES, *FURTHER_SCHEDULES)},
    # (DDP refuses its hook for bfloat16 on CPUs.)
    **{f"ddp-{mb}-fp16": _ddp(mb, "fp16") for mb in DDP_BUCKETS_MB},
    **{f"wfbp-auto-{half}": _wfbp("auto", half) for half in HALVES},
}
"""What can compete, by name; the order is that of the tables."""


DEFAULTS = [
    name
    for name in CONTESTANTS
    if name.removeprefix("wfbp-") not in FURTHER_SCHEDULES and not name.endswith(HALVES)
]

"""The layers of random programs, and the network that calls them one after another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.program import Layer, Program

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class _Wide(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, size)
        self.down = nn.Linear(size, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class _Tokens(nn.Module):
    """An embedding of token numbers, read off the input; only few of its rows are ever used."""

    tokens = True

    def __init__(self, width: int, size: int, bag: bool, **options: Any) -> None:
        super().__init__()
        self._size = size
        self._bag = bag
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.table = kind(size, width, **({"mode": "sum"} if bag else {}), **options)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows = tokens % self._size
        return x + (self.table(rows) if self._bag else self.table(rows).sum(1))


class _Tied(nn.Module):
    """Another layer's weight, transposed."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unsqueeze(0)
        return x + self.inner(rows, rows, rows, need_weights=False)[0].squeeze(0)


class _Empty(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum(0) + self.bias


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.temperature


class _Convolution(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, size, (1, 3), padding=(0, 1))
        self.inner.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = torch.stack([x, x * x], 1).unsqueeze(2)
        return x + torch.tanh(self.inner(image)).mean(1).squeeze(1)


class _Recurrent(nn.Module):
    def __init__(self, width: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.unsqueeze(1))[0].squeeze(1)


class _Vectors(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.randn(width) / 3 for _ in range(size))
        self.named = nn.ParameterDict({"last": torch.randn(width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for vector in self.vectors:
            x = torch.tanh(x + vector)
        return x + self.named["last"]


class _Transposed(nn.Module):
    """A weight whose elements lie in memory column by column."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(width, width) / 2).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class _Complex(nn.Module):
    """A complex weight, used by its real and its imaginary part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.complex128) / 2)

    def to(self, dtype: torch.dtype) -> _Complex:  # type: ignore[override]
        return super().to(dtype.to_complex())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x.to(self.weight.dtype) @ self.weight
        return torch.tanh(z.real + z.imag * z.real)


def _normed(width: int) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(width, width))


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear": lambda w, s: nn.Linear(w, w),
    "linear without bias": lambda w, s: nn.Linear(w, w, bias=False),
    "wide": _Wide,
    "embedding": lambda w, s: _Tokens(w, s, False),
    "embedding with padding": lambda w, s: _Tokens(w, s, False, padding_idx=0),
    "sparse embedding": lambda w, s: _Tokens(w, s, False, sparse=True),
    "sparse bag": lambda w, s: _Tokens(w, s, True, sparse=True),
    "weight norm": lambda w, s: nn.utils.parametrizations.weight_norm(nn.Linear(w, w)),
    "old weight norm": lambda w, s: _normed(w),
    "attention": lambda w, s: _Attention(w),
    "empty": lambda w, s: _Empty(w),
    "scalar": lambda w, s: _Scalar(),
    "norm": lambda w, s: nn.LayerNorm(w),
    "convolution": lambda w, s: _Convolution(s),
    "lstm": lambda w, s: _Recurrent(w, nn.LSTM),
    "gru": lambda w, s: _Recurrent(w, nn.GRU),
    "vectors": _Vectors,
    "transposed": lambda w, s: _Transposed(w),
    "complex": lambda w, s: _Complex(w),
}
"""By kind; ``tied`` (another's weight) and ``again`` (another's module) come on top."""

SPARSE = ("sparse embedding", "sparse bag")
WITH_WEIGHT = ("linear", "linear without bias")


class _Fails(torch.autograd.Function):
    """Whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ProgramError("in backward")


class ProgramError(Exception):
    """What a program raises and catches itself."""


class Network(nn.Module):
    """One model of a program."""

    def __init__(self, program: Program, model: int) -> None:
        super().__init__()
        self.dtype = DTYPES[program.dtype]
        self.places = [k for k, part in enumerate(program.layers) if part.model == model]
        self.about = [program.layers[k] for k in self.places]
        self.parts = nn.ModuleDict()
        for k, about in zip(self.places, self.about, strict=True):
            if about.kind == "again":
                continue
            if about.kind == "tied":
                part: nn.Module = _Tied(self.parts[str(about.of)])  # type: ignore[arg-type]
            else:
                part = LAYERS[about.kind](program.width, about.size)
                part.to(DTYPES[about.dtype or program.dtype])
            if not about.trainable:
                part.requires_grad_(False)
            self.parts[str(k)] = part

    def forward(
        self,
        x: torch.Tensor,
        tokens: torch.Tensor,
        uses: Sequence[bool] | None = None,
        error: str = "",
    ) -> torch.Tensor:
        """The output, as wide as the input.

        Args:
            x: rows of numbers.
            tokens: rows of token numbers.
            uses: which layers are used, all by default.
            error: ``forward`` or ``backward``: where to fail, in the middle.
        """
        for n, (k, about) in enumerate(zip(self.places, self.about, strict=True)):
            if error and n == len(self.places) // 2:
                if error == "forward":
                    raise ProgramError("in forward")
                x = _Fails.apply(x + torch.zeros((), dtype=x.dtype, requires_grad=True))
            if uses is None or uses[n]:
                x = self._call(
                    self.parts[str(k if about.kind != "again" else about.of)], about, x, tokens
                )
        return x

    def _call(
        self, part: nn.Module, about: Layer, x: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        args = (tokens,) if isinstance(part, _Tokens) else ()
        dtype = DTYPES[about.dtype] if about.dtype else self.dtype
        y = x.to(dtype)
        if about.checkpoint:
            reentrant = about.checkpoint == "reentrant"
            y = checkpoint(part, y, *args, use_reentrant=reentrant)
        else:
            y = part(y, *args)
        if isinstance(part, nn.Linear):
            y = torch.tanh(y)
        return y.to(self.dtype)

"""Smaller elements on the wire."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from wfbp.core.types import COMPRESSIONS, may_encode
from wfbp.runtime import arguments


class Compressor:
    """Turns tensors of named operations into those to send, and back; this one does nothing."""

    dtype: torch.dtype | None = None
    """Floating-point tensors are sent as this type, or unchanged. All that the optimizer reads."""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what :meth:`decompress` needs to know."""
        narrow = tensor.to(cls.dtype) if cls.dtype and tensor.is_floating_point() else tensor
        return narrow, tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as it was, but for rounding."""
        return tensor.to(ctx)


class NoneCompressor(Compressor):
    """Tensors travel as they are."""


class FP16Compressor(Compressor):
    """Floating point travels as float16: 11 significant bits, up to 65504."""

    dtype = torch.float16


class BF16Compressor(Compressor):
    """Floating point travels as bfloat16: 8 significant bits, in float32's range."""

    dtype = torch.bfloat16


class Int8Compressor(Compressor):
    """Gradients of a ``DistributedOptimizer`` travel in 8 bits, as by ``compression="int8"``."""

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """``ValueError``: it is for no other operation."""
        raise ValueError(
            f"compression is {cls.__name__}; it is for gradients of a DistributedOptimizer, and "
            "this operation sends fp16 or bf16 at best"
        )


class FP8Compressor(Int8Compressor):
    """Gradients of a ``DistributedOptimizer`` travel in 8 bits, as by ``compression="fp8"``."""


class Int4Compressor(Int8Compressor):
    """Gradients of a ``DistributedOptimizer`` travel in 4 bits, as by ``compression="int4"``."""


class Compression:
    """The compressors there are.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> small, ctx = wfbp.Compression.fp16.compress(torch.ones(2))
        >>> small.dtype, wfbp.Compression.fp16.decompress(small, ctx).dtype
        (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    fp8 = FP8Compressor
    int4 = Int4Compressor


def check_compressor(compression: object, what: str) -> None:
    """Raise ``ValueError`` unless ``compression`` has the methods of a :class:`Compressor`."""
    if not hasattr(compression, "compress"):
        raise ValueError(
            f"compression of {what} is {compression!r}; expected a class, such as "
            "wfbp.Compression.fp16; names and rules are for gradients of a DistributedOptimizer"
        )


Choice = str | type[Compressor] | Mapping[str, "str | type[Compressor]"]
"""An optimizer's compression; see :func:`wfbp.torch.DistributedOptimizer`."""


def wires_of(
    compression: Choice,
    named: Sequence[tuple[str, torch.Tensor]],
    known: Sequence[tuple[str, torch.Tensor]] | None = None,
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """How gradients of these parameters are sent; embeddings exactly, unless a rule names them.
    Rules may also be for other ``known`` parameters."""
    names = (name for name in COMPRESSIONS if hasattr(Compression, name))
    kinds = {getattr(Compression, name): name for name in names}

    def named_choice(choice: object) -> object:
        return kinds.get(choice, choice) if isinstance(choice, type) else choice

    if isinstance(compression, Mapping):
        rules: dict[str, object] = {k: named_choice(choice) for k, choice in compression.items()}
        given: object = rules
        choices = [*rules.values()]
    else:
        choices = [given := named_choice(compression)]
    encodes = any(may_encode(COMPRESSIONS.get(str(choice), "")) for choice in choices)
    embeddings = _embeddings() if encodes else set()
    exempt = {name for name, param in named if id(param) in embeddings}
    return arguments.wires_of(
        given, [name for name, _ in named], exempt, [name for name, _ in known or ()]
    )


def _embeddings() -> set[int]:
    """The ids of all parameters of embeddings."""
    # An optimizer knows parameters, but no modules. Frozen objects are not listed.
    if frozen := gc.get_freeze_count():
        gc.unfreeze()
    kinds = (nn.Embedding, nn.EmbeddingBag)
    modules = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    if frozen:
        gc.freeze()
    return {id(param) for module in modules for param in module.parameters(recurse=False)}

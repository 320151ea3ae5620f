"""Smaller elements on the wire."""

from __future__ import annotations

from typing import Any

import torch


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

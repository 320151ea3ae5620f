"""Scales gradients by their norm over all of them; each rank may hold a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.runtime import Runtime

LABEL = "optimizer.clip_grad_norm_()"
_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Limit:
    """Arguments of a call of ``clip_grad_norm_``; the same on every rank."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool

    @classmethod
    def of(cls, max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> Limit:
        """The limit by a caller's arguments; else ``TypeError`` or ``ValueError``."""
        remedy = (
            "a number of at least 0. The optimizer knows its parameters: call "
            "optimizer.clip_grad_norm_(max_norm)"
        )
        largest = _number("max_norm", max_norm, remedy)
        if not largest >= 0:
            raise ValueError(f"max_norm is {largest}; expected {remedy}")
        power = _number("norm_type", norm_type, "a number above 0, or infinity")
        if not power > 0:
            raise ValueError(f"norm_type is {power}; expected a number above 0, or infinity")
        return cls(largest, power, bool(error_if_nonfinite))


def _number(name: str, value: Any, expected: str) -> float:
    """A number, also one in a tensor or an array."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    shown = repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
    raise TypeError(f"{name} is {shown}; expected {expected}")


def clip(
    runtime: Runtime,
    channel: ControlChannel | None,  # None if all gradients are whole, and no other rank calls this
    limit: Limit,
    shards: Sequence[torch.Tensor],  # this rank's parts of gradients
    whole: Sequence[torch.Tensor],  # the same on every rank
    own: Sequence[torch.Tensor] = (),  # of this rank alone, scaled as well
) -> tuple[float, float]:
    """Scale gradients so that their norm is at most the limit's; returns the norm before, and the
    factor. A collective."""
    norms = _norms(shards, limit.norm_type)
    if channel is None or runtime.rank == 0:
        norms += _norms(whole, limit.norm_type)
    norm = _total(norms, limit.norm_type)
    if channel is not None:
        remedy = "Every rank must clip by the same limit"
        norm = _total(
            channel.exchange_values(norm, LABEL, [asdict(limit)], remedy), limit.norm_type
        )
    if limit.error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"{runtime.where}: the norm of the gradients is {norm}, so they cannot be clipped. "
            "Skip this step, or pass error_if_nonfinite=False"
        )
    factor = limit.max_norm / (norm + _TINY)
    scaled = [*shards, *whole, *own]
    if factor >= 1.0:
        return norm, 1.0
    if scaled:  # also if the norm is not a number, as in PyTorch
        torch._foreach_mul_(scaled, factor)
    return norm, factor


def _norms(parts: Sequence[torch.Tensor], norm_type: float) -> list[float]:
    norms = [
        torch.linalg.vector_norm(t.to(torch.promote_types(t.dtype, torch.float64)), norm_type)
        for t in parts
        if t.numel()
    ]
    return torch.stack(norms).tolist() if norms else []  # where a device is waited for, once


def _total(norms: Sequence[float], norm_type: float) -> float:
    """The norm of all parts, from the norms of each."""
    with np.errstate(over="ignore"):  # then it is infinite
        return float(np.linalg.norm([0.0, *norms], norm_type))

"""Scales gradients by their norm over all of them; each rank may hold a part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
import torch

from wfbp.errors import DisagreementError
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
        """The limit by a caller's arguments.

        Raises ``TypeError`` if a norm is no number, such as the parameters; ``ValueError`` if it is
        out of range.
        """
        largest = _number(max_norm)
        if largest is None or not largest >= 0:
            kind = TypeError if largest is None else ValueError
            raise kind(
                f"max_norm is {_shown(max_norm)}; expected a number of at least 0. The optimizer "
                "knows its parameters: call optimizer.clip_grad_norm_(max_norm)"
            )
        power = _number(norm_type)
        if power is None or not power > 0:
            kind = TypeError if power is None else ValueError
            raise kind(f"norm_type is {_shown(norm_type)}; expected a number above 0, or infinity")
        return cls(largest, power, bool(error_if_nonfinite))


def _number(value: Any) -> float | None:
    """A number, also one in a tensor or an array; None for anything else."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(value: Any) -> str:
    """A value for messages: numbers and text as they are, else the class."""
    plain = value is None or isinstance(value, str | int | float)
    return repr(value) if plain else f"a {type(value).__qualname__}"


def clip(
    runtime: Runtime,
    exchange: Callable[[bytes, str], list[bytes]],
    limit: Limit,
    shards: Sequence[torch.Tensor],  # this rank's parts of gradients
    whole: Sequence[torch.Tensor],  # the same on every rank
    alone: bool = False,  # whether all are whole, and other ranks do not call this
    shard_factor: float | None = None,  # by what shards will be multiplied; None to scale them here
) -> tuple[float, float | None]:
    """Scale gradients so that their norm is at most the limit's; a collective.

    Returns the norm before, and the shards' factor from here on.
    """
    so_far = 1.0 if shard_factor is None else shard_factor
    norms = [norm * so_far for norm in _norms(shards, limit.norm_type)]
    if alone or runtime.rank == 0:
        norms += _norms(whole, limit.norm_type)
    mine = np.array([_power(norms, limit.norm_type), *astuple(limit)], np.float64)
    payloads = [mine.tobytes()] if alone else exchange(mine.tobytes(), LABEL)
    powers = np.array([np.frombuffer(payload) for payload in payloads])
    _compare(runtime, powers[:, 1:])
    norm = _norm(powers[:, 0], limit.norm_type)
    if limit.error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"{runtime.where}: the norm of the gradients is {norm}, so they cannot be clipped. "
            "Leave this step out, or pass error_if_nonfinite=False"
        )
    factor = limit.max_norm / (norm + _TINY)
    if factor >= 1.0:  # no number is not
        return norm, shard_factor
    scaled = [*shards, *whole] if shard_factor is None else [*whole]
    if scaled:  # nothing where this rank's shards are empty
        torch._foreach_mul_(scaled, factor)
    return norm, None if shard_factor is None else so_far * factor


def _norms(parts: Sequence[torch.Tensor], norm_type: float) -> list[float]:
    norms = [
        torch.linalg.vector_norm(t.to(torch.promote_types(t.dtype, torch.float64)), norm_type)
        for t in parts
        if t.numel()
    ]
    return torch.stack(norms).tolist() if norms else []  # where a device is waited for, once


def _power(norms: Sequence[float], norm_type: float) -> float:
    """The part of the norm that these contribute: the sum of their p-th powers, or the maximum."""
    if math.isinf(norm_type):
        return float(np.max(norms, initial=0.0))
    with np.errstate(over="ignore"):  # then it is infinite
        return float(np.sum(np.asarray(norms, np.float64) ** norm_type))


def _norm(powers: Any, norm_type: float) -> float:
    """The norm of all parts, from what every rank has of it; added in the same order everywhere."""
    if math.isinf(norm_type):
        return float(np.max(powers))
    norm: float = float(np.sum(powers)) ** (1.0 / norm_type)
    return norm


def _compare(runtime: Runtime, limits: Any) -> None:
    """Raise ``DisagreementError`` on every rank unless all clip alike."""
    for rank, theirs in enumerate(limits):
        for field, value, first in zip(fields(Limit), theirs, limits[0], strict=True):
            if value != first:
                raise DisagreementError(
                    f"{runtime.where}: {LABEL}: ranks disagree: {field.name} is {first:g} on rank "
                    f"0 and {value:g} on rank {rank}. Every rank must clip by the same limit"
                )

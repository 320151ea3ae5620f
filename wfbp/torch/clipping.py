"""Scaling gradients of which every rank may hold a part, by their norm over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """What a call of ``clip_grad_norm_`` asks for; the same on every rank."""

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
    limit: Limit,
    shards: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
    alone: bool = False,
) -> float:
    """Scale gradients so that their norm is at most the limit's, and return the norm before; a
    collective.

    Args:
        limit: compared with the other ranks' in the message that carries the norm.
        shards: this rank's parts of gradients.
        whole: gradients that are the same on every rank.
        alone: whether all are whole, and other ranks do not call this.

    Raises:
        RuntimeError: the norm is not finite and the limit forbids that; nothing was scaled.
        DisagreementError: ranks have different limits.
    """
    parts = [*shards, *(whole if alone or runtime.rank == 0 else ())]
    mine = np.array([_power(parts, limit.norm_type), *astuple(limit)], np.float64)
    payloads = [mine.tobytes()] if alone else runtime.exchange(mine.tobytes(), LABEL)
    powers = np.array([np.frombuffer(payload) for payload in payloads])
    _compare(runtime, powers[:, 1:])
    norm = _norm(powers[:, 0], limit.norm_type)
    if limit.error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"{runtime.where}: the norm of the gradients is {norm}, so they cannot be clipped. "
            "Leave this step out, or pass error_if_nonfinite=False"
        )
    factor = limit.max_norm / (norm + _TINY)
    scaled = [*shards, *whole]  # nothing where this rank's shards are empty
    if scaled and not factor >= 1.0:  # also where the norm is no number
        torch._foreach_mul_(scaled, factor)
    return norm


def _power(parts: Sequence[torch.Tensor], norm_type: float) -> float:
    """What of the norm lies in these: the sum of their p-th powers, or the maximum."""
    norms = [torch.linalg.vector_norm(t.double(), norm_type) for t in parts if t.numel()]
    if math.isinf(norm_type):
        return float(np.max([float(n) for n in norms], initial=0.0))
    return float(sum(n**norm_type for n in norms))


def _norm(powers: Any, norm_type: float) -> float:
    """The norm of all parts, from what every rank has of it; added in the same order everywhere."""
    if math.isinf(norm_type):
        return float(np.max(powers))
    norm: float = float(np.sum(powers)) ** (1.0 / norm_type)
    return norm


def _compare(runtime: Runtime, limits: Any) -> None:
    """Raise ``DisagreementError`` on every rank, naming the argument and two ranks, unless all clip
    alike."""
    for rank, theirs in enumerate(limits):
        for field, value, first in zip(fields(Limit), theirs, limits[0], strict=True):
            if value != first:
                raise DisagreementError(
                    f"{runtime.where}: {LABEL}: ranks disagree: {field.name} is {first:g} on rank "
                    f"0 and {value:g} on rank {rank}. Every rank must clip by the same limit"
                )

"""Agreement between ranks, reached once, so that no step needs to negotiate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from wfbp.core.types import TensorSpec
from wfbp.errors import DisagreementError

_MAX_NAMED = 5


def encode_specs(specs: Sequence[TensorSpec], settings: dict[str, Any]) -> bytes:
    """What a rank says of its tensors when an engine is made."""
    rows = [[s.name, list(s.shape), s.dtype] for s in specs]
    return json.dumps({"tensors": rows, "settings": settings}).encode()


def check_specs(who: str, payloads: Sequence[bytes]) -> None:
    """Compare every rank's tensors and settings with rank 0's.

    Args:
        who: this rank and what the tensors belong to, for messages.
        payloads: what each rank said.

    Raises:
        DisagreementError: on every rank: which ranks, which tensors, what each of the two has.
    """
    messages = [json.loads(p) for p in payloads]
    problems = []
    for rank, theirs in enumerate(messages):
        problems += _differences(messages[0], theirs, rank)
    if problems:
        shown = problems[:_MAX_NAMED]
        if len(problems) > _MAX_NAMED:
            shown.append(f"and {len(problems) - _MAX_NAMED} more")
        raise DisagreementError(
            f"{who}: ranks disagree: {'; '.join(shown)}. Every rank must pass the same tensors, "
            "in the same order, with the same settings"
        )


def check_equal(who: str, what: str, values: Sequence[str]) -> None:
    """Raise unless every rank said the same.

    Raises:
        DisagreementError: naming the first rank that differs from rank 0.
    """
    for rank, value in enumerate(values):
        if value != values[0]:
            raise DisagreementError(
                f"{who}: ranks disagree on {what}: rank 0 has {values[0]}, rank {rank} has {value}"
            )


def _differences(ours: dict[str, Any], theirs: dict[str, Any], rank: int) -> list[str]:
    differences = []
    mine, other_rows = ours["tensors"], theirs["tensors"]
    by_name = {row[0]: row for row in other_rows}
    names = {row[0] for row in mine}
    for row in mine:
        match = by_name.get(row[0])
        if match is None:
            differences.append(f"{_shown(row)} of rank 0 is missing on rank {rank}")
        elif match != row:
            differences.append(f"{_shown(row)} on rank 0 is {_shown(match)} on rank {rank}")
    differences += [
        f"{_shown(row)} of rank {rank} is missing on rank 0"
        for row in other_rows
        if row[0] not in names
    ]
    if not differences and mine != other_rows:
        place = next(k for k, (a, b) in enumerate(zip(mine, other_rows, strict=True)) if a != b)
        differences.append(
            f"tensor {place} is {_shown(mine[place])} on rank 0 and "
            f"{_shown(other_rows[place])} on rank {rank} (the order differs)"
        )
    # Settings follow from the tensors in part, the plan from all else: report causes only.
    for key, value in ours["settings"].items():
        other = theirs["settings"].get(key)
        if differences or other == value:
            continue
        if isinstance(value, list) and isinstance(other, list):
            differences.append(
                f"{key}: {_only_in(value, other)} on rank 0 only, "
                f"{_only_in(other, value)} on rank {rank} only"
            )
        else:
            differences.append(f"{key} is {value!r} on rank 0 and {other!r} on rank {rank}")
    return differences


def _only_in(these: list[str], those: list[str]) -> str:
    names = [name for name in these if name not in set(those)]
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (", ".join(names[:_MAX_NAMED]) or "none") + more


def _shown(row: list[Any]) -> str:
    name, shape, dtype = row
    return f"{name} {dtype}{tuple(shape)}"

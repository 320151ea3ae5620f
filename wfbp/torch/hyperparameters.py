"""The numbers by which ranks update: compared once, when the first of them are put to use.

Not when an optimizer is made: a program may load a checkpoint on one rank alone and hand its
learning rates to the others by ``broadcast_optimizer_state`` afterwards. And not later: what a
program then makes of them is its own affair.
"""

from __future__ import annotations

import json
from numbers import Real
from typing import Any

import torch

from wfbp.errors import DisagreementError
from wfbp.runtime.runtime import Runtime


def check_equal_on_ranks(runtime: Runtime, optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise unless every rank's parameter groups have the same hyperparameters; a collective.

    Those that the optimizer knows defaults for are compared, as far as they are plain values.

    Args:
        runtime: of this rank.
        optimizer: of the same class on every rank.
        name: of the optimizer, for messages.

    Raises:
        DisagreementError: on every rank: which hyperparameter, and what two ranks have.
    """
    mine = _hyperparameters(optimizer)
    label = f"{name}: comparing learning rates and the like"
    by_rank = [json.loads(text) for text in runtime.exchange(json.dumps(mine).encode(), label)]
    for rank, theirs in enumerate(by_rank):
        for what in {**by_rank[0], **theirs}:
            first, other = by_rank[0].get(what), theirs.get(what)
            if first != other:
                raise DisagreementError(
                    f"{runtime.where}: {name}: ranks disagree: {what} is {first} on rank 0 and "
                    f"{other} on rank {rank}. Give every rank the same, or rank 0's by "
                    "broadcast_optimizer_state(optimizer, root_rank=0) before the first step"
                )


def _hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is compared, by what messages call it."""
    groups = optimizer.param_groups
    # An optimizer that never called its base class's constructor has none.
    known = getattr(optimizer, "defaults", {})
    numbers: dict[str, Any] = {"the number of parameter groups": len(groups)}
    for number, group in enumerate(groups):
        for key in known:
            numbers[f"{key} of parameter group {number}"] = _plain(group.get(key))
    return numbers


def _plain(value: Any) -> Any:
    """A value as it can be compared; None for one that cannot."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None

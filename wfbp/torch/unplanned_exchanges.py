"""Exchanges outside the plan: sparse gradients, hyperparameters, the loss of a closure.

Every function is a collective among the ranks of a reducer.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from wfbp.core.ranks import differences, name_values
from wfbp.errors import DisagreementError
from wfbp.runtime.reducer import Reducer
from wfbp.torch import tensors

_MOST_NAMES = 4


def sparse_sums(
    reducer: Reducer,
    params: Sequence[torch.Tensor],
    sparse: Mapping[int, torch.Tensor],  # this rank's sparse gradients, by index
    average: bool,
) -> dict[int, torch.Tensor]:
    """By index, the sum or average of what any rank has; halves are added in float32."""
    mine = BytesIO()
    np.save(mine, list(sparse))
    for gradient in sparse.values():
        grad = gradient.detach().coalesce()
        values = tensors.on_host(grad.values()).view(torch.uint8)  # NumPy lacks bfloat16
        np.save(mine, grad.indices().cpu().numpy())
        np.save(mine, values.numpy())
    payloads = reducer.channel.exchange(mine.getvalue(), "sparse gradients")
    ranks = [
        {index: (np.load(file), np.load(file)) for index in np.load(file).tolist()}
        for file in map(BytesIO, payloads)
    ]
    divisor = len(ranks) if average else 1
    return {
        index: _sum(params[index], [rank[index] for rank in ranks if index in rank], divisor)
        for index in reducer.outcome.sparse
    }


def add_sparse_sums(
    reducer: Reducer,
    params: Sequence[torch.Tensor],
    sparse: Mapping[int, torch.Tensor],  # as for `sparse_sums`
    reduced: Sequence[object],  # by index, None where no rank had a dense gradient
    average: bool,
) -> None:
    """Let ``p.grad`` hold what is sparse on some rank, dense if any is."""
    for index, total in sparse_sums(reducer, params, sparse, average).items():
        param, grad = params[index], params[index].grad
        if grad is None:
            param.grad = total
        elif grad.is_sparse:
            if reduced[index] is not None:
                total = grad + total
            # Programs may keep it, and zero it in later steps: then it stays the same object.
            if total.is_sparse and not (grad.requires_grad or grad.is_inference()):
                with torch.no_grad():
                    grad.copy_(total)
            else:
                param.grad = total
        elif reduced[index] is None:
            param.grad = total
        else:
            grad.add_(total)


def _sum(param: torch.Tensor, parts: Sequence[tuple[Any, Any]], divisor: int) -> torch.Tensor:
    wide = torch.promote_types(param.dtype, torch.float32)
    places = [torch.from_numpy(place) for place, _ in parts]
    values = [torch.from_numpy(value).view(param.dtype).to(wide) for _, value in parts]
    total = torch.sparse_coo_tensor(
        torch.cat(places, 1), torch.cat(values), param.shape, check_invariants=True
    ).coalesce()
    if divisor > 1:
        total = total / divisor
    return total.to(param.dtype).to(param.device).coalesce()


def beginnings_that_differ(
    reducer: Reducer,
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.Tensor],  # which must have the same values on all ranks
) -> list[DisagreementError]:
    """How ranks differ before the first step, in their parameters and hyperparameters; the same on
    every rank."""
    groups = optimizer.param_groups
    settings: dict[str, Any] = {
        "the number of parameter groups": len(groups),
        "check_parameters": bool(params),
    }
    for number, group in enumerate(groups):
        # An optimizer that never called its base class's constructor has no defaults.
        for key in getattr(optimizer, "defaults", {}):
            settings[f"{key} of parameter group {number}"] = _plain(group.get(key))
    marks = [zlib.crc32(tensors.raw(tensors.on_host(p)).data) for p in params]
    label = "comparing learning rates and the like"
    ranks = reducer.channel.exchange_values([settings, marks], label)
    problems = _parameters_that_differ(reducer, [others for _, others in ranks])
    if shown := differences({rank: [theirs] for rank, (theirs, _) in enumerate(ranks)}):
        problems.append(
            f"{reducer.who}: ranks disagree on {shown}. Give every rank the same, or rank 0's by "
            "broadcast_optimizer_state(optimizer, root_rank=0) before the first step"
        )
    return list(map(DisagreementError, problems))


def _parameters_that_differ(reducer: Reducer, marks: Sequence[Sequence[int]]) -> list[str]:
    """A sentence on checksums of parameters that differ from rank 0's, if all ranks have any."""
    by_rank: dict[int, str] = {}
    for rank, theirs in enumerate(marks if all(marks) else []):
        pairs = zip(reducer.specs, marks[0], theirs, strict=True)
        if names := [spec.name for spec, first, other in pairs if first != other]:
            rest = f" and {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES)
            by_rank[rank] = ", ".join(names[:_MOST_NAMES]) + rest
    if not by_rank:
        return []
    return [
        f"{reducer.who}: ranks start with different parameters. These differ from rank 0's: "
        f"{name_values(by_rank)}. Averages of gradients do not make them equal: call "
        "wfbp.broadcast_parameters(model.state_dict(), root_rank=0) before the first step. For "
        "ranks that are to differ, pass check_parameters=False to wfbp.torch.DistributedOptimizer"
    ]


def compare_arguments(reducer: Reducer, arguments: Mapping[str, Any]) -> None:
    """Raise ``DisagreementError`` on every rank unless all call ``step()`` with equal numbers and
    texts."""
    same = [{name: _plain(value) for name, value in arguments.items()}]
    remedy = "Pass the same on every rank, for example averaged by wfbp.allreduce()"
    reducer.channel.exchange(b"", "arguments of step()", same=same, remedy=remedy)


def _plain(value: Any) -> Any:
    """A value as it can be compared; None for one that cannot."""
    if isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array {value.shape} {value.dtype} {zlib.crc32(value.tobytes()):x}"
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        data = tensors.raw(tensors.on_host(value.detach()).contiguous())
        return f"tensor {tuple(value.shape)} {value.dtype} {zlib.crc32(data.data):x}"
    return None


def combined_losses(reducer: Reducer, result: Any, average: bool, joined: bool = False) -> Any:
    """The result of a closure, with the sum or average over the ranks instead of each loss in it.
    Ranks that have ``joined`` have no data, and count as zero."""
    leaves, structure = tree_flatten(result)
    is_bare = bool(leaves) and leaves[0] is result
    numbers = [_number(leaf) if is_bare or _is_loss(leaf) else None for leaf in leaves]
    mine = [number for number in numbers if number is not None]
    label = "the loss of step(closure)"
    ranks = reducer.channel.exchange_values(None if joined else mine, label)
    by_rank = [numbers for numbers in ranks if numbers]
    if len(set(map(len, by_rank))) > 1:
        raise DisagreementError(
            f"{reducer.who}: closures return different numbers of losses: "
            f"{name_values({rank: len(numbers or ()) for rank, numbers in enumerate(ranks)})}"
        )
    count = len(by_rank) + ranks.count(None) if average else 1
    combined = iter([sum(each) / count for each in zip(*by_rank, strict=True)])
    for place, number in enumerate(numbers):
        if number is not None:
            leaves[place] = _as(leaves[place], next(combined))
    return tree_unflatten(leaves, structure)


def _is_loss(value: Any) -> bool:
    """Of the values in a container: not predictions, labels or counts."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.is_floating_point()
    return isinstance(value, float)


def _number(value: Any) -> float | None:
    """A real number, also as a tensor; None for anything else."""
    if isinstance(value, torch.Tensor):
        is_real = value.numel() == 1 and not value.is_complex()
    else:
        is_real = isinstance(value, Real) and not isinstance(value, bool)
    return float(value.detach() if isinstance(value, torch.Tensor) else value) if is_real else None


def _as(value: Any, number: float) -> Any:
    if not isinstance(value, torch.Tensor):
        return number
    dtype = None if value.is_floating_point() else torch.float
    return torch.full_like(value.detach(), number, dtype=dtype)

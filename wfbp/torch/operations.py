"""Synchronous collectives on tensors, under Horovod's names."""

from __future__ import annotations

import torch

from wfbp.core.types import Op
from wfbp.runtime import operations, world
from wfbp.runtime.rows import gather_bytes
from wfbp.torch import tensors


def allreduce(tensor: torch.Tensor, name: str | None = None, op: Op = Op.AVERAGE) -> torch.Tensor:
    """Combine a tensor over all ranks.

    Args:
        tensor: same shape and element type on every rank.
        name: for messages.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``. The average of integers is
            truncated to an integer.

    Returns:
        A new tensor.

    Raises:
        TypeError: no tensor.
        ValueError: a tensor that cannot be sent.
        DisagreementError: ranks called different operations.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.allreduce(torch.tensor([1.0, 2.0]))
        tensor([1., 2.])
    """
    return allreduce_(_copy(tensor), name, op)


def allreduce_(tensor: torch.Tensor, name: str | None = None, op: Op = Op.AVERAGE) -> torch.Tensor:
    """Combine a tensor over all ranks, in place; see :func:`allreduce`."""
    runtime = world.current("allreduce()")
    tensors.check("tensor", tensor)
    whole = tensors.on_host(tensor)
    buffer = tensors.raw(whole).view(tensors.storage(tensor.dtype))
    dtype = tensors.NAMES[tensor.dtype]
    operations.reduce_in_place(runtime, buffer, dtype, tensor.shape, op, name)
    return _written(tensor, whole)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The root's tensor, on every rank.

    Args:
        tensor: same shape and element type on every rank.
        root_rank: whose values everybody gets.
        name: for messages.

    Returns:
        A new tensor.

    Raises:
        ValueError: a tensor that cannot be sent, or no such rank.
        DisagreementError: ranks called different operations.
    """
    return broadcast_(_copy(tensor), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Copy the root's tensor to every rank, in place; see :func:`broadcast`."""
    runtime = world.current("broadcast()")
    tensors.check("tensor", tensor)
    whole = tensors.on_host(tensor)
    dtype = tensors.NAMES[tensor.dtype]
    operations.broadcast_in_place(runtime, tensors.raw(whole), dtype, tensor.shape, root_rank, name)
    return _written(tensor, whole)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """The tensors of all ranks, concatenated along the first dimension in rank order.

    Args:
        tensor: at least one dimension; sizes may differ between ranks in the first one only.
        name: for messages.

    Returns:
        A new tensor.

    Raises:
        ValueError: a scalar, or a tensor that cannot be sent.
        DisagreementError: ranks called different operations.
    """
    runtime = world.current("allgather()")
    tensors.check("tensor", tensor)
    if tensor.dim() == 0:
        raise ValueError("allgather needs at least one dimension; found a scalar")
    whole = tensors.on_host(tensor)
    data, rows = gather_bytes(
        runtime,
        tensors.raw(whole),
        tensors.NAMES[tensor.dtype],
        tensor.element_size(),
        tuple(tensor.shape),
        name,
    )
    values = torch.from_numpy(data.view(tensors.storage(tensor.dtype)))
    return values.view(tensor.dtype).view(rows, *tensor.shape[1:]).to(tensor.device)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    tensors.check("tensor", tensor)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _written(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The tensor, with the values of its contiguous stand-in."""
    if whole.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(whole)
    return tensor

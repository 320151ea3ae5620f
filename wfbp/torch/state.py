"""Every rank starts from the same parameters and the same optimizer state."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from wfbp.runtime import signals
from wfbp.runtime.api.parameters import MANY, broadcast_one, compare_many
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.consistency import SAME_TENSORS, check_root
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensor_operands, tensors


@signals.deferred
def broadcast_parameters(
    parameters: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's parameters and buffers to every rank, in place.

    Args:
        parameters: a model's ``state_dict()`` or ``named_parameters()``; entries that are no
            tensors are left alone. Or tensors without names, as its ``parameters()``, which go by
            their order.
        root_rank: the rank whose values are sent; its number among all ranks.
        process_set: the ranks that take part.

    Raises:
        TypeError: none of these, as a model or a single tensor.
        ValueError: a tensor that cannot be sent, no such rank, or a rank outside the process set.
        PeerError: another rank found one of these.
        DisagreementError: ranks passed different names, shapes or element types.
    """
    runtime = api.runtime_of(process_set, "broadcast_parameters()")
    _broadcast_tensors(runtime, parameters, lambda: runtime.members.root(root_rank))


def broadcast_buffers(
    model: torch.nn.Module, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Copy the root's buffers, such as BatchNorm's running statistics, to every rank, in place.

    They differ between ranks, because each rank's forward updates them by its own batches. They do
    not change gradients, so it is enough to call this before an evaluation or a checkpoint, on
    every rank. (DDP does it in every forward, which hangs if one rank evaluates alone. To do
    so: ``model.register_forward_pre_hook(lambda m, _: broadcast_buffers(m) if m.training else
    None)``.)

    Args:
        model: alike on every rank.
        root_rank: the rank whose buffers are sent; its number among all ranks.
        process_set: the ranks that take part.

    Raises:
        Exception: as :func:`broadcast_parameters`.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> wfbp.broadcast_buffers(torch.nn.BatchNorm1d(3))
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__qualname__}; pass a torch.nn.Module")
    broadcast_parameters(dict(model.named_buffers()), root_rank, process_set)


def share(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.Tensor]],
    root: int,
) -> None:
    """Copy a rank's parameters and optimizer state to the other ranks of a runtime."""
    _broadcast_tensors(runtime, named, lambda: root)
    _broadcast_state(runtime, optimizer, root)


def _broadcast_tensors(runtime: Runtime, parameters: Any, find_root: Callable[[], int]) -> None:
    """As :func:`broadcast_parameters`; an error of ``find_root`` is sent to the other ranks."""
    rows = []
    with runtime.channel.sharing_errors(MANY):
        named_tensors = _tensors_of(parameters)
        root = find_root()
        check_root(runtime, root)
        for name, tensor in named_tensors.items():
            tensors.check_place(name, tensor)
            rows.append((name, str(tensor.dtype), tuple(tensor.shape)))
    compare_many(runtime, rows, root)
    if runtime.size == 1:
        return
    with torch.no_grad():
        for name, tensor in named_tensors.items():
            whole = tensors.on_host(tensor)
            tensor_operands.note_change(tensor)
            broadcast_one(runtime, name, tensors.raw(whole), root)
            if runtime.rank != root and whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def _tensors_of(parameters: Any) -> dict[str, torch.Tensor]:
    """The tensors among named values, or all of several tensors by their order."""
    named: dict[Any, Any] = {None: None}
    # A ModuleDict would pass for a mapping, and a tensor for its rows.
    if not isinstance(parameters, torch.nn.Module | torch.Tensor):
        with suppress(TypeError, ValueError, RuntimeError):
            listed = parameters if hasattr(parameters, "keys") else list(parameters)
            if all(isinstance(p, torch.Tensor) for p in listed):
                listed = [(f"parameter {k}", p) for k, p in enumerate(listed)]
            named = dict(listed)
    if not all(isinstance(name, str) for name in named):
        raise TypeError(
            f"parameters is a {type(parameters).__qualname__}; pass model.state_dict(), "
            "model.named_parameters() or tensors in the same order on every rank"
        )
    return {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}


@signals.deferred
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's optimizer state and hyperparameters to every rank.

    Args:
        optimizer: of the same parameters on every rank; ranks without state get the root's, with
            its element types. A distributed one may be in mid-training.
        root_rank: the rank whose state is sent; its number among all ranks.
        process_set: the ranks that take part.

    Raises:
        ValueError: no such rank, or a rank outside the process set.
        DisagreementError: ranks called different operations.
    """
    runtime = api.runtime_of(process_set, "broadcast_optimizer_state()")
    root = runtime.members.root(root_rank)
    check_root(runtime, root)
    if runtime.size > 1:
        _broadcast_state(runtime, optimizer, root)


def _broadcast_state(runtime: Runtime, optimizer: torch.optim.Optimizer, root: int) -> None:
    """As :func:`broadcast_optimizer_state`, among the ranks of a runtime."""
    state: Any = optimizer.state_dict() if runtime.rank == root else None
    contents = [leaf.detach() for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]
    outline = tree_map_only(torch.Tensor, _Slot.of, state)
    payload = pickle.dumps(outline) if runtime.rank == root else b""
    label, same = "broadcast_optimizer_state", [{"root_rank": root}]
    outlines = runtime.channel.exchange(payload, label, same=same, remedy=SAME_TENSORS)
    outline = pickle.loads(outlines[root])
    if runtime.rank != root:
        params = (param for group in optimizer.param_groups for param in group["params"])
        here = next((param.device for param in params), torch.device("cpu"))
        slots = [leaf for leaf in tree_leaves(outline) if isinstance(leaf, _Slot)]
        contents = [slot.empty(here) for slot in slots]
        rest = iter(contents)
        state = tree_map_only(_Slot, lambda _: next(rest), outline)
    named = {f"optimizer state {k}": tensor for k, tensor in enumerate(contents)}
    _broadcast_tensors(runtime, named, lambda: root)
    # On the root, too: loading adds to the optimizer's defaults, which new groups get, and from the
    # next step on every rank shards the state anew.
    optimizer.load_state_dict(state)
    _restore_types(getattr(optimizer, "_wfbp_original", optimizer), state)


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a tensor in a state, in its memory order, in which fused optimizers step."""

    layout: tensors.Layout
    on_device: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Slot:
        return cls(tensors.Layout.of(tensor), tensor.device.type != "cpu")

    def empty(self, device: torch.device) -> torch.Tensor:
        return self.layout.empty(device if self.on_device else torch.device("cpu"))


def _restore_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Undo the casts of ``load_state_dict()`` to the element types of parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in state["param_groups"] for name in group["params"]]
    for param, name in zip(params, names, strict=True):
        held, sent = optimizer.state.get(param, {}), state["state"].get(name, {})
        for key in held.keys() & sent.keys():
            with suppress(ValueError):  # the optimizer keeps it in another form
                held[key] = tree_map(_as_sent, held[key], sent[key])


def _as_sent(loaded: Any, sent: Any) -> Any:
    both = isinstance(loaded, torch.Tensor) and isinstance(sent, torch.Tensor)
    return sent.to(loaded.device) if both and loaded.dtype is not sent.dtype else loaded

"""Every rank starts from the same parameters and the same optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from wfbp.runtime import signals
from wfbp.runtime.api.parameters import MANY, broadcast_object_among, broadcast_one, compare_many
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.consistency import check_root, sharing_argument_errors
from wfbp.runtime.runtime import Runtime
from wfbp.torch import operands, tensors
from wfbp.torch.collectives import broadcast_async_


@signals.deferring
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
        root_rank: whose values everybody gets; its number among all ranks.
        process_set: the ranks that take part.

    Raises:
        TypeError: none of these, as a model or a single tensor.
        ValueError: a tensor that cannot be sent, no such rank, or a rank outside the process set.
        PeerError: another rank found one of these.
        DisagreementError: ranks passed different names, shapes or element types.
    """
    runtime = api.runtime_of(process_set, "broadcast_parameters()")
    _broadcast_tensors(runtime, parameters, lambda: runtime.members.root(root_rank))


def share(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.Tensor]],
    root: int,
) -> None:
    """Copy a rank's parameters and optimizer state to the other ranks of a runtime; collective.

    ``root`` is its number in the runtime.
    """
    _broadcast_tensors(runtime, named, lambda: root)
    _broadcast_state(runtime, optimizer, root)


def _broadcast_tensors(runtime: Runtime, parameters: Any, find_root: Callable[[], int]) -> None:
    """As :func:`broadcast_parameters`; an error of ``find_root`` is sent to the other ranks."""
    rows, placed = [], []
    with sharing_argument_errors(runtime, MANY):
        named_tensors = _tensors_of(parameters)
        root = find_root()
        check_root(runtime, root)
        for place, (name, tensor) in enumerate(named_tensors.items()):
            tensors.check_place(name, tensor)
            rows.append((name, str(tensor.dtype), tuple(tensor.shape)))
            if runtime.collectives is not None and operands.goes_by_device(
                runtime.collectives, tensor
            ):
                placed.append(place)
    by_device = compare_many(runtime, rows, root, placed)
    if runtime.size == 1:
        return
    under_way = [
        broadcast_async_(tensor, root, f"{MANY}: {name}")
        for place, (name, tensor) in enumerate(named_tensors.items())
        if place in by_device
    ]
    with torch.no_grad():
        for place, (name, tensor) in enumerate(named_tensors.items()):
            if place not in by_device:
                whole = tensors.on_host(tensor)
                operands.note_change(tensor)
                broadcast_one(runtime, name, tensors.raw(whole), root)
                if runtime.rank != root and whole.data_ptr() != tensor.data_ptr():
                    tensor.copy_(whole)
    for handle in under_way:
        api.synchronize(handle)


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


@signals.deferring
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's optimizer state and hyperparameters to every rank.

    Args:
        optimizer: of the same parameters on every rank; ranks without state get the root's, with
            its element types. A distributed one may be in mid-training.
        root_rank: whose state everybody gets; its number among all ranks.
        model: for Horovod's programs, which pass it where state cannot be made otherwise.
        process_set: the ranks that take part.

    Raises:
        ValueError: no such rank, or a rank outside the process set.
        DisagreementError: ranks called different operations.
    """
    runtime = api.runtime_of(process_set, "broadcast_optimizer_state()")
    root = runtime.members.root(root_rank)
    check_root(runtime, root)
    if runtime.size == 1:
        return
    _broadcast_state(runtime, optimizer, root)


def _broadcast_state(runtime: Runtime, optimizer: torch.optim.Optimizer, root: int) -> None:
    """As :func:`broadcast_optimizer_state`, among the ranks of a runtime."""
    whole = None
    if runtime.rank == root:
        # From the next step on every rank shards the state anew, also this one.
        getattr(_distributed(optimizer), "_wfbp_take_whole_state", lambda: None)()
        whole = optimizer.state_dict()
    outline, contents = _outline_and_tensors(whole)
    outline = broadcast_object_among(runtime, outline, root, "optimizer state")
    if runtime.rank != root:
        here = _place_of(optimizer)
        contents = [
            torch.empty(shape, dtype=dtype, device=here if on_device else "cpu")
            for shape, dtype, on_device in outline["tensors"]
        ]
    named = {f"optimizer state {k}": tensor for k, tensor in enumerate(contents)}
    _broadcast_tensors(runtime, named, lambda: root)
    if runtime.rank != root:
        state = _put_together(outline["tree"], contents)
        optimizer.load_state_dict(state)
        _restore_types(optimizer, state)
    elif hasattr(optimizer, "defaults"):
        # Loading a state has PyTorch add to the optimizer's defaults, which new groups get.
        original = getattr(optimizer, "_wfbp_original", optimizer)
        torch.optim.Optimizer.__setstate__(original, {})


def _place_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Where an optimizer's parameters lie, the first one at least."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    return next((param.device for param in params), torch.device("cpu"))


def _distributed(optimizer: torch.optim.Optimizer) -> Any:
    """What was last made of an optimizer, or itself."""
    return optimizer.__dict__.get("_wfbp_wrapped", optimizer)


def _restore_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Undo what PyTorch does when it loads: it casts state to the element types of parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in state["param_groups"] for name in group["params"]]
    for param, name in zip(params, names, strict=True):
        held = optimizer.state.get(param, {})
        for key, sent in state["state"].get(name, {}).items():
            if key in held:
                held[key] = _as_sent(held[key], sent)


def _as_sent(held: Any, sent: Any) -> Any:
    """A loaded value in the element types that it was sent with, where it was loaded to."""
    if isinstance(sent, torch.Tensor) and isinstance(held, torch.Tensor):
        return held if held.dtype is sent.dtype else sent.to(held.device)
    if isinstance(sent, dict) and isinstance(held, dict):
        return {key: _as_sent(value, sent.get(key)) for key, value in held.items()}
    if isinstance(sent, list | tuple) and type(held) is type(sent) and len(held) == len(sent):
        return type(held)(map(_as_sent, held, sent))
    return held


class _TensorSlot:
    """Where a tensor stood in a state that was taken apart."""

    def __init__(self, index: int) -> None:
        self.index = index


def _outline_and_tensors(state: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A state without its tensors, and the tensors."""
    contents: list[torch.Tensor] = []

    def walk(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            contents.append(node.detach())
            return _TensorSlot(len(contents) - 1)
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return type(node)(walk(value) for value in node)
        return node

    tree = walk(state)
    outlined = [(tuple(t.shape), t.dtype, t.device.type != "cpu") for t in contents]
    return {"tree": tree, "tensors": outlined}, contents


def _put_together(node: Any, contents: list[torch.Tensor]) -> Any:
    if isinstance(node, _TensorSlot):
        return contents[node.index]
    if isinstance(node, dict):
        return {key: _put_together(value, contents) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_put_together(value, contents) for value in node)
    return node

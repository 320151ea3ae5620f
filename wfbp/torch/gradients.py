"""Ties parameters to an engine: hooks announce gradients, and results become ``p.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.runtime import world
from wfbp.runtime.engine.engine import Engine
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.slot import BufferView, GradientRef
from wfbp.torch import tensors
from wfbp.torch.devices import device_of
from wfbp.torch.forward_profiler import ForwardProfiler
from wfbp.torch.uncompiled import uncompiled
from wfbp.torch.witness import GradientGuard

_EMPTY = 1
"""Stands for the address of a tensor without elements, which has none; 0 means no gradient."""


class GradientHooks:
    """The gradients of one optimizer's parameters.

    Used by the training thread. Hooks run in the thread that called ``backward()``.

    Args:
        runtime: with more than one rank.
        named: names and parameters, equal on every rank.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: for the ``threshold`` planner, and for what others begin with.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        passes: backward passes per step.
        sparse_as_dense: whether sparse gradients are made dense; they are an error otherwise.
        name: of the optimizer, for messages.
        kind: the optimizer's class, which must be the same on every rank.
        decouples: whether the optimizer can do with shards of gradients.
        shares_update: whether each rank then updates its shards only.
    """

    def __init__(
        self,
        runtime: Runtime,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        schedule: str,
        threshold_bytes: int,
        op: Op,
        passes: int,
        sparse_as_dense: bool,
        name: str,
        kind: type,
        decouples: bool = False,
        shares_update: bool = False,
    ) -> None:
        self._names = [n for n, _ in named]
        self.params = self._params = [p for _, p in named]
        self._sparse_as_dense = sparse_as_dense
        self._name = name
        self._views: list[torch.Tensor | None] = [None] * len(named)
        self._moved: list[dict[int, torch.Tensor]] = [{} for _ in named]
        self._views_of = 0
        self._successor = ""
        self.before_release: Callable[[], None] = lambda: None
        """Called before another object takes over."""
        self.specs = self._specs = specs = [tensors.spec(n, p) for n, p in named]
        # Data travels in the order that parameters have now, whatever becomes of them.
        self._layouts = [tensors.Layout.of(p) for p in self._params]
        self.engine = self._engine = engine = Engine(
            runtime,
            specs,
            schedule=schedule,
            threshold_bytes=threshold_bytes,
            op=op,
            passes=passes,
            active=[p.requires_grad for p in self._params],
            decouples=decouples,
            shares_update=shares_update,
            compared={
                "the optimizer's class": f"{kind.__module__}.{kind.__qualname__}",
                "memory order": [
                    f"{n} {order}" for n, p in named if (order := tensors.unusual_order(p))
                ],
            },
            device=device_of(name, named),
            fetch=_fetcher(weakref.ref(self)),
            name=name,
        )
        self._guard = GradientGuard(name, self._names)
        self.report = engine.report
        self._forward = ForwardProfiler(engine, self._params)
        self._hooks: dict[int, Any] = {}
        for index, param in enumerate(self._params):
            previous = _owners.get(id(param))
            if previous is not None:
                previous.hand_over(self._names[index])
            _owners[id(param)] = self
            if param.requires_grad:
                self._hook(index)
        weakref.finalize(self, _remove, self._hooks, self._engine, self._forward)

    @property
    def open(self) -> bool:
        """Whether gradients have appeared that no step has taken."""
        return self._engine.open

    def reduce(self, whole: bool, wanted: bool = False) -> list[BufferView | None]:
        """Close the step, wait, and let ``p.grad`` be the reduced gradient of each parameter.

        Args:
            whole: whether the optimizer cannot do with shards; the same on every rank.
            wanted: whether this rank's program cannot, of which the others do not know.

        Returns:
            Where each gradient lies; where it is a shard, ``p.grad`` is left as it is.

        Raises:
            RuntimeError: gradients were changed since backward, or a parameter has been wrapped
                again.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        if self._successor:
            raise RuntimeError(
                f"{self._name}: another DistributedOptimizer was made of {self._successor}; use "
                "that one. A parameter's gradient can be exchanged by one of them only"
            )
        for index in self._guard.check(self._params):
            self._engine.drop(index)
        if self._views_of != self._engine.num_installed:  # they hold another plan's buffers
            self._views_of = self._engine.num_installed
            self._views = [None] * len(self._params)
            self._moved = [{} for _ in self._params]
        reduced = self._engine.synchronize(whole, wanted)
        self._guard.clear()
        self.take(reduced)
        self._forward.follow()
        return reduced

    def take(self, reduced: Sequence[BufferView | None]) -> None:
        """Let ``p.grad`` be what is whole of the reduced gradients."""
        views, params, layouts = self._views, self._params, self._layouts
        for index, slot in enumerate(reduced):
            if slot is None or not slot.whole:
                continue
            held = views[index]
            # Whoever has a gradient may let it be another memory, or reorder it.
            if (
                held is None
                or held.data_ptr() != slot.address
                or held.stride() != layouts[index].stride
            ):
                if held is not None and params[index].grad is held:
                    # Programs that accumulate into it may hold it, too: it stays the same object.
                    moved = self._moved[index]
                    if slot.address not in moved:
                        moved[slot.address] = tensors.view(slot.data, layouts[index])
                    held.data = moved[slot.address]
                    continue
                held = views[index] = tensors.view(slot.data, layouts[index])
            if params[index].grad is not held:
                params[index].grad = held

    def leave_buffers(self) -> None:
        """Let ``p.grad`` be memory of its own: the engine's goes at ``shutdown()``."""
        for param, view in zip(self._params, self._views, strict=True):
            if view is not None and param.grad is view:
                param.grad = view.clone()
        self._views = [None] * len(self._params)

    def discard(self) -> None:
        """Forget gradients that appeared since the last step."""
        self._guard.clear()
        if not self._successor:
            self._engine.discard()

    def hand_over(self, shared: str) -> None:
        """Let the parameters go, up to date, because another object takes over one of them."""
        self.before_release()
        self.release()
        self._successor = shared

    def release(self) -> None:
        """Let the parameters go: their gradients are no longer exchanged by this object."""
        self._successor = "these parameters"
        _remove(self._hooks, self._engine, self._forward)

    def source(self, index: int) -> GradientRef | None:
        """Where a parameter's gradient lies now, or None."""
        param = self._params[index]
        if param.requires_grad and index not in self._hooks:
            self._hook(index)
        grad = param.grad
        return None if grad is None else self._source(index, grad)

    def _source(self, index: int, grad: torch.Tensor) -> GradientRef:
        """A gradient's address, in the memory order and element type of its parameter."""
        layout = self._layouts[index]
        if grad.is_sparse:
            if not self._sparse_as_dense:
                raise ValueError(
                    f"{self._name}: the gradient of {self._names[index]} is sparse; make its layer "
                    "with sparse=False, or pass sparse_as_dense=True to DistributedOptimizer"
                )
            grad = grad.to_dense()
        layout.check(self._params[index], grad, f"{self._name}: {self._names[index]}")
        if grad.stride() != layout.stride or grad.dtype is not layout.dtype:
            grad = layout.empty(grad.device).copy_(grad)
        return grad.data_ptr() or _EMPTY, grad

    def _hook(self, index: int) -> None:
        """Announce the parameter's gradient from now on, whenever backward has accumulated it."""
        param = self._params[index]
        mark_ready = self._engine.mark_ready
        dtype = param.dtype
        count = param.numel() if param.is_contiguous() else -1
        this = weakref.ref(self)
        guard = self._guard
        grads, versions, sample = guard.grads, guard.versions, guard.sample
        wanted, uses, tensor, watched = guard.wanted, guard.uses, torch.Tensor, guard.watched

        @uncompiled
        def announce(param: torch.Tensor) -> None:
            grad = param.grad
            assert grad is not None
            kind = type(grad)
            if kind is watched:
                grad.__class__ = kind = tensor
            # A sparse gradient is never contiguous.
            if grad.is_contiguous() and grad.numel() == count and grad.dtype is dtype:
                mark_ready(index, grad.data_ptr() or _EMPTY, grad)
            else:
                address, owner = this()._source(index, grad)  # type: ignore[union-attr]
                mark_ready(index, address, owner)
            grads[index] = grad
            versions[index] = grad._version
            if index in wanted:
                sample(index, grad)
            if uses:
                uses.pop(index, None)
            if kind is tensor:
                grad.__class__ = watched

        handle = param.register_post_accumulate_grad_hook(announce)  # type: ignore[no-untyped-call]
        self._hooks[index] = handle


def _fetcher(this: weakref.ref[GradientHooks]) -> Callable[[int], GradientRef | None]:
    def fetch(index: int) -> GradientRef | None:
        gradients = this()
        return None if gradients is None else gradients.source(index)

    return fetch


_owners: weakref.WeakValueDictionary[int, GradientHooks] = weakref.WeakValueDictionary()
"""Whose hooks a parameter has, by the parameter's id, which its owner keeps alive.

(An attribute of the parameter would be pickled with it.)
"""


def _leave_buffers() -> None:
    for gradients in list(_owners.values()):
        gradients.leave_buffers()


world.before_shutdown(_leave_buffers)


def _remove(hooks: dict[int, Any], engine: Engine, forward: ForwardProfiler) -> None:
    forward.stop()
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
    engine.close()

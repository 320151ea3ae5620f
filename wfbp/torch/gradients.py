"""Ties parameters to an engine: hooks announce gradients, and results become ``p.grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.runtime.engine import Engine, Slot, Source
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensors
from wfbp.torch.forward import ForwardClock

_OWNER = "_wfbp_gradients"
_EMPTY = 1
"""Stands for the address of a tensor without elements, which has none; 0 means no gradient."""


class Gradients:
    """The gradients of one optimizer's parameters.

    Used by the training thread. Hooks run in the thread that called ``backward()``.

    Args:
        runtime: with more than one rank.
        named: names and parameters, equal on every rank.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: for the ``threshold`` planner.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        passes: backward passes per step.
        sparse_as_dense: whether sparse gradients are made dense; they are an error otherwise.
        name: of the optimizer, for messages.
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
    ) -> None:
        self._names = [n for n, _ in named]
        self._params = [p for _, p in named]
        self._sparse_as_dense = sparse_as_dense
        self._name = name
        self._views: list[tuple[Slot, torch.Tensor] | None] = [None] * len(named)
        self._first: tuple[torch.Tensor, int, int] | None = None
        specs = [tensors.spec(n, p) for n, p in named]
        self._engine = Engine(
            runtime,
            specs,
            schedule=schedule,
            threshold_bytes=threshold_bytes,
            op=op,
            passes=passes,
            active=[p.requires_grad for p in self._params],
            fetch=_fetcher(weakref.ref(self)),
            name=name,
        )
        self.report = self._engine.report
        self._forward = ForwardClock(self._engine, self._params)
        self._hooks: dict[int, Any] = {}
        for index, param in enumerate(self._params):
            previous = getattr(param, _OWNER, lambda: None)()
            if previous is not None:
                previous.release()
            setattr(param, _OWNER, weakref.ref(self))
            if param.requires_grad:
                self._hook(index)
        weakref.finalize(self, _remove, self._hooks, self._engine)

    @property
    def open(self) -> bool:
        """Whether gradients have appeared that no step has taken."""
        return self._engine.open

    def synchronize(self) -> None:
        """Close the step, wait, and let ``p.grad`` be the reduced gradient of each parameter.

        Raises:
            RuntimeError: gradients were changed in place since backward.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        self._check_unchanged()
        reduced = self._engine.synchronize()
        views, params = self._views, self._params
        for index, slot in enumerate(reduced):
            if slot is None:
                continue
            held = views[index]
            if held is None or held[0] is not slot:
                held = views[index] = (slot, tensors.view(slot.data, params[index]))
            if params[index].grad is not held[1]:
                params[index].grad = held[1]
        self._first = None
        self._forward.follow()

    def discard(self) -> None:
        """Forget gradients that appeared since the last step."""
        self._first = None
        self._engine.discard()

    def release(self) -> None:
        """Let the parameters go: their gradients are no longer exchanged by this object."""
        _remove(self._hooks, self._engine)

    def source(self, index: int) -> Source | None:
        """Where a parameter's gradient lies now, or None."""
        param = self._params[index]
        if param.requires_grad and index not in self._hooks:
            self._hook(index)
        grad = param.grad
        return None if grad is None else self._source(index, grad)

    def _source(self, index: int, grad: torch.Tensor) -> Source:
        """A gradient's address, in the memory order and element type of its parameter."""
        param = self._params[index]
        if grad.is_sparse:
            if not self._sparse_as_dense:
                raise ValueError(
                    f"{self._name}: the gradient of {self._names[index]} is sparse; make its layer "
                    "with sparse=False, or pass sparse_as_dense=True to DistributedOptimizer"
                )
            grad = grad.to_dense()
        if grad.stride() != param.stride() or grad.dtype is not param.dtype:
            grad = torch.empty_like(param, requires_grad=False).copy_(grad)
        if not tensors.is_dense(grad):
            grad = grad.contiguous()
        return grad.data_ptr() or _EMPTY, grad

    def _hook(self, index: int) -> None:
        """Announce the parameter's gradient from now on, whenever backward has accumulated it."""
        param = self._params[index]
        mark_ready = self._engine.mark_ready
        dtype = param.dtype
        contiguous = param.is_contiguous()
        this = weakref.ref(self)
        is_witness = not self._hooks

        def announce(param: torch.Tensor) -> None:
            grad = param.grad
            assert grad is not None
            if not grad.is_sparse and contiguous and grad.is_contiguous() and grad.dtype is dtype:
                mark_ready(index, grad.data_ptr() or _EMPTY, grad)
            else:
                address, owner = this()._source(index, grad)  # type: ignore[union-attr]
                mark_ready(index, address, owner)
            if is_witness:
                this()._first = (grad, grad._version, index)  # type: ignore[union-attr]

        handle = param.register_post_accumulate_grad_hook(announce)  # type: ignore[no-untyped-call]
        self._hooks[index] = handle

    def _check_unchanged(self) -> None:
        """Catch gradients that were clipped or unscaled before they were averaged."""
        if self._first is None:
            return
        grad, version, index = self._first
        if grad._version != version:
            raise RuntimeError(
                f"{self._name}: the gradient of {self._names[index]} was changed in place after "
                "backward and before it was averaged over the ranks. Call "
                "optimizer.synchronize() first, then change gradients, then step inside "
                "'with optimizer.skip_synchronize():'"
            )


def _fetcher(this: weakref.ref[Gradients]) -> Callable[[int], Source | None]:
    def fetch(index: int) -> Source | None:
        gradients = this()
        return None if gradients is None else gradients.source(index)

    return fetch


def _remove(hooks: dict[int, Any], engine: Engine) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
    engine.close()

"""DistributedOptimizer: any PyTorch optimizer, with its gradients averaged over the ranks."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.runtime import world
from wfbp.runtime.arguments import check_arguments
from wfbp.torch import tensors
from wfbp.torch.arguments import chosen_nature, named_params
from wfbp.torch.exchange import Exchange

_WRAPPED = "_wfbp_wrapped"
"""Attribute of an optimizer: what was last made of it, and may hold shards of its state."""


class _Asked(enum.Enum):
    """Who asked for the averages that the next step is to use.

    It changes with calls that every rank makes, and not with what gradients a rank has: by it the
    ranks decide alike whether to communicate. It is forgotten by ``step()`` and ``zero_grad()``.
    """

    NOBODY = 0
    PROGRAM = 1
    """``synchronize()`` or ``clip_grad_norm_()``."""
    SCALER = 2
    """``GradScaler.step()``, which does not tell when it skips the step."""


class _Distributed(torch.optim.Optimizer):
    """What is laid over the user's optimizer class: gradients are reduced before a step."""

    _wfbp_original: torch.optim.Optimizer
    _wfbp_exchange: Exchange | None
    _wfbp_make: Callable[[], Exchange | None]
    _wfbp_asked: _Asked
    _wfbp_skip: bool

    def synchronize(self) -> None:
        """Wait until all gradients of this step are averaged; ``p.grad`` then holds the averages.

        Use it before reading or changing gradients, and step inside :meth:`skip_synchronize`;
        to clip them, :meth:`clip_grad_norm_` costs less. Parameters that still travel are waited
        for, too: afterwards ``p.data`` is up to date. Every rank must call it.

        Raises:
            RuntimeError: gradients were changed in place since backward.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        if self._wfbp_exchange is not None:
            self._wfbp_exchange.synchronize()
        self._wfbp_asked = _Asked.PROGRAM

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` takes gradients as they are: they have been synchronized.

        Raises:
            RuntimeError: :meth:`synchronize` was not called since backward.
        """
        pending = self._wfbp_exchange is not None and self._wfbp_exchange.open
        if self._wfbp_asked is _Asked.NOBODY or pending:
            raise RuntimeError("call optimizer.synchronize() before skip_synchronize()")
        self._wfbp_skip = True
        try:
            yield
        finally:
            self._wfbp_skip = False

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their norm over all parameters is at most ``max_norm``.

        To be called between ``backward()`` and :meth:`step`, on every rank. Takes what
        ``torch.nn.utils.clip_grad_norm_`` takes, for the averaged gradients of this optimizer's
        parameters; ranks that hold shards of them add their parts of the norm in one small
        all-reduce.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: 2, or another p of the p-norm, or infinity.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            WfbpError: as :meth:`synchronize`.
        """
        if self._wfbp_exchange is None:
            params = [p for group in self.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        self._wfbp_reduce()
        return self._wfbp_exchange.clip_grad_norm_(max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless that was done, and let the optimizer step.

        Args:
            closure: computes the loss and its gradients; called by the optimizer, as often as it
                likes.
        """
        exchange = self._wfbp_exchange
        # A scheduler made before wrapping watches the original for calls of step().
        self._wfbp_original._opt_called = True  # type: ignore[attr-defined]
        if closure is not None:
            if exchange is not None:
                exchange.prepare_whole()
            try:
                return super().step(lambda: self._wfbp_evaluate(closure))
            finally:
                self._wfbp_asked = _Asked.NOBODY
        if not self._wfbp_skip:
            self._wfbp_reduce()
        elif exchange is not None:
            exchange.check_settled()
        self._wfbp_asked = _Asked.NOBODY
        return super().step() if exchange is None else exchange.step()

    def state_dict(self) -> dict[str, Any]:
        """The state in the ordinary form, whatever the schedule. Every rank must call it."""
        if self._wfbp_exchange is None:
            return super().state_dict()
        own = self.state
        self.state = self._wfbp_exchange.whole_state()  # type: ignore[assignment]
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the groups and the state that the wrapped optimizer shares.

        A learning-rate scheduler made before wrapping goes on acting on them. Every rank must
        load the same state.
        """
        if self._wfbp_exchange is not None:
            self._wfbp_exchange.forget_state()
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        groups[:], loaded = self.param_groups, dict(self.state)
        state.clear()
        state.update(loaded)
        self.param_groups, self.state = groups, state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those on their way."""
        if self._wfbp_exchange is not None:
            self._wfbp_exchange.discard()
        self._wfbp_asked = _Asked.NOBODY
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; every rank must add the same ones.

        Those that ``named_parameters`` did not name go by their place in the optimizer.
        """
        if self._wfbp_exchange is not None:
            self._wfbp_exchange.release()
        self._wfbp_asked = _Asked.NOBODY
        super().add_param_group(param_group)
        if self._wfbp_exchange is not None:
            self._wfbp_exchange = self._wfbp_make()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a distributed {type(self).__name__} cannot be copied or pickled: it exchanges "
            "gradients with other ranks; copy or save its state_dict()"
        )

    def report(self) -> dict[str, Any]:
        """The plan in use and what it costs; empty with one rank.

        Keys: ``schedule``, ``phase``, ``steps``, ``num_groups``, ``num_tensors``,
        ``total_bytes``, ``overlap``, ``kappa``, ``plan_digest``, and in seconds
        ``predicted_iteration_s``, ``measured_iteration_s``, ``predicted_exposed_s``,
        ``exposed_s``, ``lower_bound_s``; ``ratio_to_lower_bound`` is T/LB.
        """
        return self._wfbp_exchange.report() if self._wfbp_exchange is not None else {}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``torch.amp.GradScaler.step`` asks before it looks at gradients.

        They must be averaged by then, so that an infinity on one rank makes every rank skip.
        """
        exchange = self._wfbp_exchange
        if exchange is not None:
            if self._wfbp_asked is not _Asked.PROGRAM:
                exchange.synchronize()
            else:
                exchange.check_settled()
                if exchange.holds_shards:
                    exchange.synchronize()
        if self._wfbp_asked is _Asked.NOBODY:
            self._wfbp_asked = _Asked.SCALER
        return bool(getattr(super(), "_step_supports_amp_scaling", False))

    def _wfbp_reduce(self) -> None:
        """Close the step, unless that was done."""
        exchange = self._wfbp_exchange
        if exchange is not None:
            if self._wfbp_asked is _Asked.NOBODY:
                exchange.reduce()
            else:
                exchange.check_settled()
        if self._wfbp_asked is _Asked.NOBODY:
            self._wfbp_asked = _Asked.PROGRAM

    def _wfbp_release(self) -> None:
        """Another one is made of the same optimizer, on every rank."""
        if self._wfbp_exchange is not None:
            self._wfbp_exchange.release()

    def _wfbp_evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        return loss


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    sparse_as_dense: bool = False,
    update: str = "auto",
) -> Any:
    """Wrap an optimizer so that it averages gradients over all ranks while backward computes.

    The result is an instance of the optimizer's own class that shares its parameter groups and
    state; use it instead of the original, also for learning-rate schedulers. Every rank must call
    this, for the same parameters in the same order.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``, for messages and to match ranks; numbers
            stand in for names where it is missing.
        schedule: how gradients are grouped: ``auto``, ``oasr``, ``mgwfbp``, ``wfbp``, ``single``
            or ``threshold``; or, decoupled into backward and the next forward, ``dear``,
            ``ipart``, ``independent``, ``hybrid``, ``ps`` or ``ps_layerwise``; by default what
            ``WFBP_SCHEDULE`` says, or ``auto``.
        threshold_bytes: group size of ``threshold``; by default ``WFBP_THRESHOLD_BYTES`` or 25 MiB.
        backward_passes_per_step: how many ``backward()`` calls precede each ``step()``.
        op: ``Average`` or ``Sum``.
        sparse_as_dense: whether sparse gradients are made dense.
        update: what follows decoupled gradients: ``sharded``, each rank updates its shard of
            each tensor and holds the state of it alone; ``replicated``, every rank updates all;
            or ``auto``, what the optimizer allows, which is found by experiment.

    Returns:
        The distributed optimizer.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: not an optimizer.
        ValueError: a bad argument, or a parameter that cannot be sent.
        DisagreementError: ranks passed different parameters or settings.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = wfbp.DistributedOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """
    runtime = world.current("DistributedOptimizer()")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__qualname__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is distributed already")
    previous = optimizer.__dict__.pop(_WRAPPED, None)
    if previous is not None:
        previous._wfbp_release()
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    # A scheduler made before may have put its own step() on the instance: ours must be found.
    wrapped.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    config = runtime.config
    planner = config.schedule if schedule is None else schedule
    limit_bytes = config.threshold_bytes if threshold_bytes is None else threshold_bytes
    known = None if named_parameters is None else list(named_parameters)
    nature = chosen_nature(optimizer, update)

    def make() -> Exchange | None:
        named = named_params(wrapped, known, complete=wrapped._wfbp_exchange is None)
        if runtime.size == 1:
            specs = [tensors.spec(name, p) for name, p in named]
            check_arguments(
                specs, planner, limit_bytes, op, backward_passes_per_step, decouples=True
            )
            return None
        return Exchange(
            runtime,
            wrapped,
            named,
            nature,
            super(_Distributed, wrapped).step,
            schedule=planner,
            threshold_bytes=limit_bytes,
            op=op,
            passes=backward_passes_per_step,
            sparse_as_dense=sparse_as_dense,
            name=kind.__name__,
        )

    wrapped._wfbp_original = optimizer
    wrapped._wfbp_asked = _Asked.NOBODY
    wrapped._wfbp_skip = False
    wrapped._wfbp_exchange = None
    wrapped._wfbp_exchange = make()
    wrapped._wfbp_make = make
    optimizer.__dict__[_WRAPPED] = wrapped
    return wrapped

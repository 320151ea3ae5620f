"""DistributedOptimizer: any PyTorch optimizer, with its gradients averaged over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from wfbp.core.types import Op
from wfbp.runtime import world
from wfbp.runtime.arguments import check_arguments
from wfbp.torch import tensors
from wfbp.torch.gradients import Gradients


class _Distributed(torch.optim.Optimizer):
    """What is laid over the user's optimizer class: gradients are reduced before a step."""

    _wfbp_original: torch.optim.Optimizer
    _wfbp_gradients: Gradients | None
    _wfbp_make: Callable[[], Gradients | None]
    _wfbp_synchronized: bool
    _wfbp_skip: bool

    def synchronize(self) -> None:
        """Wait until all gradients of this step are averaged; ``p.grad`` then holds the averages.

        Use it before reading or changing gradients (clipping, unscaling), and step inside
        :meth:`skip_synchronize`. Every rank must call it.

        Raises:
            RuntimeError: gradients were changed in place since backward.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        if self._wfbp_gradients is not None:
            self._wfbp_gradients.synchronize()
        self._wfbp_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` takes gradients as they are: they have been synchronized.

        Raises:
            RuntimeError: :meth:`synchronize` was not called since backward.
        """
        if not self._wfbp_synchronized or self._wfbp_pending:
            raise RuntimeError("call optimizer.synchronize() before skip_synchronize()")
        self._wfbp_skip = True
        try:
            yield
        finally:
            self._wfbp_skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless that was done, and let the optimizer step.

        Args:
            closure: computes the loss and its gradients; called by the optimizer, as often as it
                likes.
        """
        if closure is not None:
            return super().step(lambda: self._wfbp_evaluate(closure))
        if not self._wfbp_skip:
            self._wfbp_ensure()
        self._wfbp_synchronized = False
        # A scheduler made before wrapping watches the original for calls of step().
        self._wfbp_original._opt_called = True  # type: ignore[attr-defined]
        return super().step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the groups and the state that the wrapped optimizer shares.

        A learning-rate scheduler made before wrapping goes on acting on them.
        """
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        groups[:], loaded = self.param_groups, dict(self.state)
        state.clear()
        state.update(loaded)
        self.param_groups, self.state = groups, state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those on their way."""
        if self._wfbp_gradients is not None:
            self._wfbp_gradients.discard()
        self._wfbp_synchronized = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; every rank must add the same ones.

        Those that ``named_parameters`` did not name go by their place in the optimizer.
        """
        super().add_param_group(param_group)
        if self._wfbp_gradients is not None:
            self._wfbp_gradients.release()
            self._wfbp_gradients = self._wfbp_make()

    def report(self) -> dict[str, Any]:
        """The plan in use and what it costs; empty with one rank.

        Keys: ``schedule``, ``phase``, ``steps``, ``num_groups``, ``num_tensors``,
        ``total_bytes``, ``overlap``, ``kappa``, ``plan_digest``, and in seconds
        ``predicted_iteration_s``, ``measured_iteration_s``, ``predicted_exposed_s``,
        ``exposed_s``, ``lower_bound_s``; ``ratio_to_lower_bound`` is T/LB.
        """
        return self._wfbp_gradients.report() if self._wfbp_gradients is not None else {}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What ``torch.amp.GradScaler.step`` asks before it looks at gradients.

        They must be averaged by then, so that an infinity on one rank makes every rank skip.
        """
        self._wfbp_ensure()
        return bool(getattr(super(), "_step_supports_amp_scaling", False))

    @property
    def _wfbp_pending(self) -> bool:
        return self._wfbp_gradients is not None and self._wfbp_gradients.open

    def _wfbp_ensure(self) -> None:
        if not self._wfbp_synchronized or self._wfbp_pending:
            self.synchronize()

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
            or ``threshold``; by default what ``WFBP_SCHEDULE`` says, or ``auto``.
        threshold_bytes: group size of ``threshold``; by default ``WFBP_THRESHOLD_BYTES`` or 25 MiB.
        backward_passes_per_step: how many ``backward()`` calls precede each ``step()``.
        op: ``Average`` or ``Sum``.
        sparse_as_dense: whether sparse gradients are made dense.

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
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    # A scheduler made before may have put its own step() on the instance: ours must be found.
    wrapped.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    config = runtime.config
    planner = config.schedule if schedule is None else schedule
    limit_bytes = config.threshold_bytes if threshold_bytes is None else threshold_bytes
    known = None if named_parameters is None else list(named_parameters)

    def make() -> Gradients | None:
        named = _names(wrapped, known, complete=wrapped._wfbp_gradients is None)
        if runtime.size == 1:
            specs = [tensors.spec(name, p) for name, p in named]
            check_arguments(specs, planner, limit_bytes, op, backward_passes_per_step)
            return None
        return Gradients(
            runtime,
            named,
            schedule=planner,
            threshold_bytes=limit_bytes,
            op=op,
            passes=backward_passes_per_step,
            sparse_as_dense=sparse_as_dense,
            name=kind.__name__,
        )

    wrapped._wfbp_original = optimizer
    wrapped._wfbp_synchronized = False
    wrapped._wfbp_skip = False
    wrapped._wfbp_gradients = None
    wrapped._wfbp_gradients = make()
    wrapped._wfbp_make = make
    return wrapped


def _names(
    optimizer: torch.optim.Optimizer,
    known: list[tuple[str, torch.Tensor]] | None,
    complete: bool,
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in forward order, each with a unique name.

    Raises:
        ValueError: a name is given twice, or a name is missing where they must be ``complete``.
    """
    owned = {
        id(p): (f"group{g}.param{k}", p)
        for g, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
    }
    if known is None:
        return list(owned.values())
    names = [name for name, _ in known]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"named_parameters has names twice: {', '.join(twice)}")
    named = [(name, p) for name, p in known if id(p) in owned]
    present = {id(p) for _, p in named}
    missing = [pair for k, pair in owned.items() if k not in present]
    if missing and complete:
        shown = ", ".join(name for name, _ in missing[:5])
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters ({shown}); pass "
            "the named_parameters() of every module that it optimizes, or none"
        )
    return named + missing

"""What is laid over an optimizer's class to make it a distributed one."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from threading import get_ident
from typing import Any, cast

import torch
from torch.optim import optimizer as torch_optimizer

from wfbp.runtime.runtime import Runtime
from wfbp.torch.arguments import check_known, param_ids
from wfbp.torch.clipping import Limit
from wfbp.torch.exchange import OptimizerSync
from wfbp.torch.uncompiled import uncompiled
from wfbp.torch.update import STEPPED

_PRE_HOOKS = "_optimizer_step_pre_hooks"


class SyncState(enum.Enum):
    """Who asked for the averages that the next step is to use.

    It changes with calls that every rank makes, and not with what gradients a rank has: by it the
    ranks decide alike whether to communicate. It is forgotten by ``step()`` and ``zero_grad()``.
    """

    NOBODY = 0
    PROGRAM = 1
    """``synchronize()`` or ``clip_grad_norm_()``."""
    SCALER = 2
    """``GradScaler.step()``, which does not tell when it skips the step."""
    IN_VAIN = 3
    """``synchronize()``, when no rank had any gradient: those that come are averaged anew."""


class DistributedOptimizerBase(torch.optim.Optimizer):
    """What is laid over the user's optimizer class: gradients are reduced before a step."""

    _wfbp_original: torch.optim.Optimizer
    _wfbp_sync: OptimizerSync | None
    _wfbp_check: Callable[[], object]
    _wfbp_make: Callable[[], OptimizerSync | None]
    _wfbp_sync_state: SyncState
    _wfbp_named: Callable[[], list[tuple[str, torch.Tensor]]]
    _wfbp_passes: int
    _wfbp_skip: bool
    _wfbp_known: frozenset[int]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups; within a step of some tensors, for the thread that steps, these tensors'."""
        held = self.__dict__
        thread, groups = held.get(STEPPED) or (0, None)
        if thread == get_ident():
            return cast(list[dict[str, Any]], groups)
        if "param_groups" not in held:
            raise AttributeError("param_groups")
        return cast(list[dict[str, Any]], held["param_groups"])

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @uncompiled
    def synchronize(self) -> None:
        """Wait until all gradients of this step are averaged; ``p.grad`` then holds the averages.

        Use it before reading or changing gradients, and step inside :meth:`skip_synchronize`;
        to clip them, :meth:`clip_grad_norm_` costs less. Parameters that still travel are waited
        for, too; for them alone call :meth:`synchronize_parameters`. Every rank must call it.

        Raises:
            RuntimeError: gradients were changed in place since backward.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        found = self._wfbp_sync is None or self._wfbp_sync.synchronize()
        self._wfbp_sync_state = SyncState.PROGRAM if found else SyncState.IN_VAIN

    @uncompiled
    def synchronize_parameters(self) -> None:
        """Wait until all parameters are up to date.

        By a schedule that decouples they may still travel after :meth:`step`. Whoever reads one
        waits for it, so this is needed only before code that PyTorch does not hear of, such as
        CUDA graphs or addresses kept elsewhere. Any rank may call it, alone.

        Raises:
            WfbpError: ranks failed, or did not answer in time.
        """
        if self._wfbp_sync is not None:
            self._wfbp_sync.flush()

    @uncompiled
    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` takes gradients as they are: they have been synchronized.

        Raises:
            RuntimeError: :meth:`synchronize` was not called since backward.
        """
        pending = self._wfbp_sync is not None and self._wfbp_sync.open
        if self._wfbp_sync_state is SyncState.NOBODY or pending:
            raise RuntimeError("call optimizer.synchronize() before skip_synchronize()")
        self._wfbp_skip = True
        try:
            yield
        finally:
            self._wfbp_skip = False

    @uncompiled
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm over all parameters is at most ``max_norm``.

        To be called between ``backward()`` and :meth:`step`, on every rank. Does what
        ``torch.nn.utils.clip_grad_norm_`` does, for the averaged gradients of this optimizer's
        parameters; ranks that hold shards of them tell each other their parts of the norm in one
        small message.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: 2, or another p of the p-norm, or infinity.
            error_if_nonfinite: raise where the norm is infinite or no number.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            TypeError: a norm that is no number.
            ValueError: a ``max_norm`` below zero, or a ``norm_type`` that is not above it.
            DisagreementError: ranks passed different arguments.
            RuntimeError: see ``error_if_nonfinite``; on every rank, and nothing was scaled.
            WfbpError: as :meth:`synchronize`.
        """
        limit = Limit.of(max_norm, norm_type, error_if_nonfinite)
        if self._wfbp_sync is None:
            params = [p for group in self.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, *astuple(limit))
        self._wfbp_reduce()
        return self._wfbp_sync.clip_grad_norm_(limit)

    @uncompiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless that was done, and let the optimizer step.

        Args:
            closure: computes the loss of this rank's data and its gradients; called by the
                optimizer, as often as it likes, on every rank alike. The optimizer is given the
                loss of all ranks, averaged (or added up, with ``op=Sum``) as the gradients are.

        Returns:
            What the optimizer's step returned: of most, the averaged loss of the first call.

        Raises:
            RuntimeError: gradients were changed since backward, or a parameter was put into
                ``param_groups`` without :meth:`add_param_group`.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        exchange = self._wfbp_sync
        if exchange is not None:
            check_known(self, self._wfbp_known)
        # A scheduler made before wrapping watches the original for calls of step().
        self._wfbp_original._opt_called = True  # type: ignore[attr-defined]
        if closure is not None:
            if exchange is not None:
                exchange.prepare_whole()
            try:
                return super().step(lambda: self._wfbp_evaluate(closure))
            finally:
                self._wfbp_sync_state = SyncState.NOBODY
        if not self._wfbp_skip:
            self._wfbp_reduce()
        elif exchange is not None:
            exchange.check_settled()
        self._wfbp_sync_state = SyncState.NOBODY
        if exchange is None:
            return super().step()
        # An optimizer that never called its base class's constructor has no hooks.
        return self._wfbp_apply() if hasattr(self, _PRE_HOOKS) else exchange.step()

    # For PyTorch, which would have load_state_dict() call the hooks around all of this once more.
    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    def _wfbp_apply(self) -> Any:
        """What the hooks of a step are called around: once, however it is carried out."""
        exchange = self._wfbp_sync
        assert exchange is not None
        result = exchange.step()
        if self._optimizer_step_post_hooks or torch_optimizer._global_optimizer_post_hooks:
            exchange.flush()
        return result

    @property
    def _wfbp_wanted(self) -> bool:
        """Whether somebody is to see the averages before the step."""
        own = getattr(self, _PRE_HOOKS, None)
        return bool(own or torch_optimizer._global_optimizer_pre_hooks)

    @uncompiled
    def state_dict(self) -> dict[str, Any]:
        """The state in the ordinary form, whatever the schedule.

        Any rank may call it, alone. Where ranks hold shards of the state, it is fetched from their
        communication threads; their training threads need not come here.

        Raises:
            DisagreementError: another rank has stepped, loaded or wrapped otherwise.
            WfbpError: ranks failed, or did not answer in time.
        """
        if self._wfbp_sync is None:
            return super().state_dict()
        own = self.state
        self.__dict__["state"] = self._wfbp_sync.whole_state()
        try:
            return super().state_dict()
        finally:
            self.__dict__["state"] = own

    def _wfbp_take_whole_state(self) -> None:
        """Hold all of the state until the next step; the others are about to load it."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.take_whole_state()

    @uncompiled
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the groups and the state that the wrapped optimizer shares.

        A learning-rate scheduler made before wrapping goes on acting on them. Every rank must
        load the same state.
        """
        exchange = self._wfbp_sync
        if exchange is not None:
            exchange.flush()
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)
        if exchange is not None:
            exchange.forget_state()
        groups[:], loaded = self.param_groups, dict(self.state)
        state.clear()
        state.update(loaded)
        self.param_groups, self.state = groups, state

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those on their way."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.discard()
        self._wfbp_sync_state = SyncState.NOBODY
        super().zero_grad(set_to_none)

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; every rank must add the same ones.

        Those that ``named_parameters`` did not name go by their place in the optimizer.
        """
        groups, exchange = self.param_groups, self._wfbp_sync
        count = len(groups)
        super().add_param_group(param_group)  # where it refuses the group, all goes on as before
        if exchange is None:
            return
        try:
            self._wfbp_check()
        finally:
            added = groups[count:]
            del groups[count:]  # what is under way is of those before
        exchange.release()
        groups += added
        self._wfbp_renew()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Have another number of ``backward()`` calls precede each step from now on.

        To be called between a step and the next backward, on every rank alike. Plans are made anew.

        Raises:
            TypeError: not a whole number.
            ValueError: less than 1.
        """
        before, self._wfbp_passes = self._wfbp_passes, passes
        try:
            self._wfbp_check()
        except (TypeError, ValueError):
            self._wfbp_passes = before
            raise
        if self._wfbp_sync is not None:
            self._wfbp_sync.release()
            self._wfbp_renew()

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names by which ranks match parameters; some programs for Horovod read this."""
        return {param: name for name, param in self._wfbp_named()}

    def _wfbp_renew(self) -> None:
        """Exchange gradients anew; what was before has let the parameters go."""
        self._wfbp_sync_state = SyncState.NOBODY
        self._wfbp_sync = self._wfbp_make()
        self._wfbp_known = param_ids(self)

    @uncompiled
    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_wfbp_original")
        if name == "state" and original is not None:
            if self._wfbp_sync is not None:
                self._wfbp_sync.before_another_state(value)
            original.__dict__["state"] = value
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a distributed {type(self).__name__} cannot be copied or pickled: it exchanges "
            "gradients with other ranks; copy or save its state_dict()"
        )

    @uncompiled
    def report(self) -> dict[str, Any]:
        """The plan in use and what it costs; empty with one rank.

        Keys: ``schedule``, ``phase``, ``steps``, ``num_groups``, ``num_tensors``,
        ``total_bytes``, ``overlap``, ``kappa``, ``plan_digest``, and in seconds
        ``predicted_iteration_s``, ``measured_iteration_s``, ``predicted_exposed_s``,
        ``exposed_s``, ``lower_bound_s``; ``ratio_to_lower_bound`` is T/LB.
        """
        return self._wfbp_sync.report() if self._wfbp_sync is not None else {}

    @property
    @uncompiled
    def _step_supports_amp_scaling(self) -> bool:
        """What ``torch.amp.GradScaler.step`` asks before it looks at gradients.

        They must be averaged by then, so that an infinity on one rank makes every rank skip.
        """
        exchange = self._wfbp_sync
        if exchange is not None:
            if self._wfbp_sync_state is not SyncState.PROGRAM:
                exchange.synchronize()
            else:
                exchange.check_settled()
                if exchange.holds_shards:
                    exchange.synchronize()
        if self._wfbp_sync_state is not SyncState.PROGRAM:
            self._wfbp_sync_state = SyncState.SCALER
        return bool(getattr(super(), "_step_supports_amp_scaling", False))

    def _wfbp_reduce(self) -> None:
        """Close the step, unless that was done."""
        exchange = self._wfbp_sync
        if exchange is not None:
            if self._wfbp_sync_state in (SyncState.NOBODY, SyncState.IN_VAIN):
                exchange.reduce(self._wfbp_wanted)
            else:
                exchange.check_settled()
        if self._wfbp_sync_state is not SyncState.SCALER:
            self._wfbp_sync_state = SyncState.PROGRAM

    def _wfbp_release(self, runtime: Runtime) -> None:
        """Another one is made of the same optimizer, on every rank.

        Raises:
            RuntimeError: shards of its state went with another runtime.
        """
        exchange = self._wfbp_sync
        if exchange is None:
            return
        if exchange.runtime is runtime:
            exchange.release()
        elif exchange.shares_state:
            raise RuntimeError(
                f"the state of this {type(self).__name__} was shared out among the ranks when wfbp "
                "was shut down; take its state_dict() before shutdown() and load it into a new one"
            )

    def _wfbp_evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        self.synchronize()
        return loss if self._wfbp_sync is None else self._wfbp_sync.combined_loss(loss)

"""DistributedOptimizer: any PyTorch optimizer, with its gradients averaged over the ranks."""

from __future__ import annotations

import enum
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from threading import get_ident
from typing import Any, TypeVar, cast

import torch
from torch.optim import optimizer as torch_optimizer

from wfbp.core.planners import check_schedule
from wfbp.core.types import Op
from wfbp.deprecation import warn_renamed
from wfbp.runtime import process, signals
from wfbp.runtime.arguments import EngineOptions
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.runtime import Runtime
from wfbp.torch import gradient_sync, tensors
from wfbp.torch.adasum import AdasumOptimizerBase
from wfbp.torch.clipping import Limit
from wfbp.torch.compression import COMPRESSED_DTYPES, Compression, Compressor
from wfbp.torch.gradient_sync import OptimizerSync
from wfbp.torch.optimizer_interface import DistributedOptimizerBase
from wfbp.torch.optimizer_probe import UpdateCoupling, probe_optimizer
from wfbp.torch.uncompiled import uncompiled
from wfbp.torch.updates import STEPPED
from wfbp.torch.wrapping import PATCHED, bare_step, note_wrapped, unwrap

UPDATES: dict[str, bool | None] = {"auto": None, "sharded": True, "replicated": False}
"""Values of the deprecated argument ``update``, and of ``optimizer_sharding``."""


def optimizer_sharding_of(sharding: bool | None, update: str | None) -> bool | None:
    """The argument ``optimizer_sharding``, or its value by the deprecated ``update``.

    Raises ``ValueError`` for an unknown value, or where both are given.
    """
    if not any(sharding is value for value in (True, False, None)):
        raise ValueError(f"optimizer_sharding is {sharding!r}; expected True, False or None")
    if update is None:
        return sharding
    if update not in UPDATES:
        raise ValueError(f"update is {update!r}; expected one of {', '.join(UPDATES)}")
    if sharding is not None:
        raise ValueError("update and optimizer_sharding say the same: leave out update")
    warn_renamed(
        f"DistributedOptimizer(update={update!r})",
        f"optimizer_sharding={UPDATES[update]}",
        stacklevel=4,
    )
    return UPDATES[update]


def chosen_coupling(optimizer: torch.optim.Optimizer, sharding: bool | None) -> UpdateCoupling:
    """The optimizer's coupling, as far as ``sharding`` allows it; ``ValueError`` if it requires
    another."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(tensors.is_dense(p) for p in params):
        return UpdateCoupling.COUPLED
    coupling = probe_optimizer(optimizer)
    if sharding is True and coupling is not UpdateCoupling.ELEMENTWISE:
        raise ValueError(
            f"optimizer_sharding is True, but {type(optimizer).__name__} does not treat every "
            "element by "
            f"itself (it is {coupling.value}); use None or False"
        )
    if sharding is False and coupling is UpdateCoupling.ELEMENTWISE:
        return UpdateCoupling.PER_TENSOR
    return coupling


def named_pairs(named_parameters: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
    """The pairs of name and parameter that a caller passed; ``TypeError`` for anything else, as
    ``model.parameters()``."""
    if isinstance(named_parameters, torch.nn.Module):
        raise TypeError("named_parameters is a module; pass model.named_parameters()")
    pairs = list(named_parameters)
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                "named_parameters must be pairs of name and parameter, found a "
                f"{type(pair).__qualname__}; pass model.named_parameters()"
            )
    return pairs


def named_params(
    optimizer: torch.optim.Optimizer,
    known: list[tuple[str, torch.Tensor]] | None,
    complete: bool,
) -> list[tuple[str, torch.Tensor]]:
    """The optimizer's parameters in forward order, each with a unique name.

    A parameter with several names goes by the first. Integer parameters, which can never have a
    gradient, are left out. Raises ``ValueError`` if a name is given twice, or missing where
    ``complete``.
    """
    owned = {
        id(p): (f"group{g}.param{k}", p)
        for g, group in enumerate(optimizer.param_groups)
        for k, p in enumerate(group["params"])
    }
    differentiable = {key: pair for key, pair in owned.items() if _differentiable(pair[1])}
    owned = differentiable or owned
    if known is None:
        return list(owned.values())
    names = [name for name, _ in known]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise ValueError(f"named_parameters has names twice: {', '.join(twice)}")
    first: dict[int, tuple[str, torch.Tensor]] = {}
    for name, p in known:
        if id(p) in owned:
            first.setdefault(id(p), (name, p))
    missing = [pair for k, pair in owned.items() if k not in first]
    if missing and complete:
        shown = ", ".join(name for name, _ in missing[:5])
        raise ValueError(
            f"named_parameters lacks {len(missing)} of the optimizer's parameters ({shown}); pass "
            "the named_parameters() of every module that it optimizes, or none"
        )
    return [*first.values(), *missing]


def check_params(named: Sequence[tuple[str, torch.Tensor]], options: EngineOptions) -> None:
    """Raise unless the gradients of these parameters can be reduced with these options.

    Raises:
        ImportError: ``dear`` without the ``search`` extra.
        TypeError: not a whole number where one is expected.
        ValueError: a bad option, or a parameter that cannot be sent.
    """
    for name, param in named:
        tensors.check(name, param)
    options.check([tensors.spec(name, param) for name, param in named])


def param_ids(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """The ids of the parameters in an optimizer's groups."""
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def check_known(optimizer: torch.optim.Optimizer, known: Collection[int]) -> None:
    """Raise ``RuntimeError`` if a parameter was put into ``param_groups`` since the optimizer was
    wrapped.

    It would be stepped with this rank's gradients alone. ``known`` are ids of parameters.
    """
    for g, group in enumerate(optimizer.param_groups):
        for k, param in enumerate(group["params"]):
            if id(param) not in known:
                raise RuntimeError(
                    f"{type(optimizer).__name__}: param_groups[{g}]['params'][{k}], of shape "
                    f"{tuple(param.shape)}, was put there after the optimizer was wrapped: its "
                    "gradients are not averaged over the ranks. Add parameters by "
                    "optimizer.add_param_group({'params': [...]}), on every rank"
                )


def _differentiable(param: torch.Tensor) -> bool:
    return param.is_floating_point() or param.is_complex()


_PRE_HOOKS = "_optimizer_step_pre_hooks"


class SyncState(enum.Enum):
    """Who asked for the averages that the next step is to use; reset by ``step()`` and
    ``zero_grad()``.

    It depends on calls that every rank makes, and not on the gradients of a rank: by it the ranks
    decide alike whether to communicate.
    """

    NOBODY = 0
    PROGRAM = 1
    """``synchronize()`` or ``clip_grad_norm_()``."""
    SCALER = 2
    """``GradScaler.step()``, which does not tell when it skips the step."""
    NO_GRADIENTS = 3
    """``synchronize()``, when no rank had any gradient: those that come are averaged anew."""


F = TypeVar("F", bound=Callable[..., Any])


def deferring(method: F) -> F:
    """Decorator: run a method within :data:`signals.deferred`, uncompiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with signals.deferred:
            return method(*args, **kwargs)

    uncompiled(call)
    return cast(F, functools.update_wrapper(call, method))


class AveragingOptimizerBase(DistributedOptimizerBase):
    """What is laid over the user's optimizer class: gradients are reduced before a step."""

    def __init__(
        self,
        runtime: Runtime | None,
        original: torch.optim.Optimizer,
        known: list[tuple[str, torch.Tensor]] | None,
        options: EngineOptions,
        *,
        coupling: UpdateCoupling,
        sparse_as_dense: bool,
    ) -> None:
        """Take over the original's parameter groups and state; a collective.

        Args:
            runtime: of the process set; None on a rank outside it, which steps alone.
            original: of the class over which this one is laid.
            known: names and parameters as the user gave them, or None.
            options: equal on every rank.
            coupling: of the optimizer.
            sparse_as_dense: whether sparse gradients are made dense.
        """
        # A scheduler made before may have put its own step() on the instance: ours must be found.
        self.__dict__.update({k: v for k, v in original.__dict__.items() if k not in PATCHED})
        self._wfbp_runtime = runtime
        self._wfbp_original = original
        self._wfbp_known = known
        self._wfbp_options = options
        self._wfbp_coupling = coupling
        self._wfbp_sparse_as_dense = sparse_as_dense
        self._wfbp_skip = False
        self._wfbp_synchronized = False  # by synchronize() itself, since the step before
        self._wfbp_sync: OptimizerSync | None = None
        self._wfbp_renew(complete=True)

    def _wfbp_renew(self, complete: bool = False) -> None:
        """Make a new exchange of gradients; an earlier one has been released. A collective."""
        named = named_params(self, self._wfbp_known, complete)
        options, kind = self._wfbp_options, type(self._wfbp_original)
        self._wfbp_sync_state = SyncState.NOBODY
        runtime = self._wfbp_runtime
        if runtime is not None and (runtime.size > 1 or runtime.config.exchange_alone):
            self._wfbp_sync = OptimizerSync(
                runtime,
                self,
                named,
                options,
                coupling=self._wfbp_coupling,
                step=bare_step(self, kind),
                sparse_as_dense=self._wfbp_sparse_as_dense,
                kind=kind,
            )
        self._wfbp_ids = param_ids(self)

    def _wfbp_check(self, options: EngineOptions) -> None:
        """Raise unless the gradients of all parameters can be reduced so."""
        check_params(named_params(self, self._wfbp_known, complete=False), options)

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

    @property
    def state(self) -> Any:
        """The state by parameter, after all updates that are due.

        Where ranks update shards, it is by shard; :meth:`state_dict` has the whole.
        """
        held = self.__dict__
        exchange = held.get("_wfbp_sync")
        if exchange is not None:
            exchange.before_state_is_used()
        if "state" not in held:
            raise AttributeError("state")
        return held["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state

    @uncompiled
    @deferring
    def synchronize(self) -> None:
        averaged = self._wfbp_sync is None or self._wfbp_sync.synchronize()
        self._wfbp_sync_state = SyncState.PROGRAM if averaged else SyncState.NO_GRADIENTS
        self._wfbp_synchronized = averaged

    @uncompiled
    @deferring
    def synchronize_parameters(self) -> None:
        if self._wfbp_sync is not None:
            self._wfbp_sync.flush()

    @uncompiled
    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        outer, self._wfbp_skip = self._wfbp_skip, True
        try:
            yield
        finally:
            self._wfbp_skip = outer

    @uncompiled
    @deferring
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        limit = Limit.of(max_norm, norm_type, error_if_nonfinite)
        if self._wfbp_sync is None:
            params = [p for group in self.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, *astuple(limit))
        if self._wfbp_sync_state is SyncState.SCALER:  # a scaler that has skipped its step
            self._wfbp_sync_state = SyncState.NOBODY
        self._wfbp_reduce()
        self._wfbp_synchronized = False  # Horovod has no such method
        return self._wfbp_sync.clip_grad_norm_(limit)

    @uncompiled
    @deferring
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless that was done, and let the optimizer step.

        A signal that arrives meanwhile is handled at the end: an exception that its handler raises,
        such as ``KeyboardInterrupt``, propagates from here, and the step is complete. So ranks stay
        equal if only one of them gets the signal.

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
            check_known(self, self._wfbp_ids)
        # A scheduler made before wrapping watches the original for calls of step().
        self._wfbp_original._opt_called = True  # type: ignore[attr-defined]
        if closure is not None:
            try:
                if exchange is not None:
                    exchange.prepare_whole()
                return super().step(lambda: self._wfbp_evaluate(closure))
            finally:
                self._wfbp_forget_sync()
        if not (self._wfbp_skip and self._wfbp_is_averaged()):
            self._wfbp_reduce()
            if self._wfbp_synchronized and exchange is not None:
                warnings.warn(
                    # Programs filter for the words of Horovod's that say what was called.
                    f"{type(self).__name__}: optimizer.step() called without "
                    "optimizer.skip_synchronize(), though synchronize() was. Here gradients are "
                    "not averaged twice, but under Horovod they are: write "
                    "`with optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=3,
                )
        elif exchange is not None:
            exchange.check_no_new_gradients()
        self._wfbp_forget_sync()
        if exchange is None:
            return super().step()
        # An optimizer that never called its base class's constructor has no hooks.
        return self._wfbp_apply() if hasattr(self, _PRE_HOOKS) else exchange.step()

    def _wfbp_is_averaged(self) -> bool:
        """Whether a step within ``skip_synchronize()`` has averages to take.

        Raises:
            RuntimeError: it has gradients that nobody has averaged.
        """
        if self._wfbp_sync_state is not SyncState.NOBODY:
            return True
        if self._wfbp_sync is not None:
            has_gradients = self._wfbp_sync.open
        else:
            has_gradients = any(p.grad is not None for g in self.param_groups for p in g["params"])
        if has_gradients:
            raise RuntimeError(
                f"{type(self).__name__}: step() within skip_synchronize() takes gradients as they "
                "are, and nobody has averaged those of this step: call optimizer.synchronize() "
                "before it"
            )
        return False

    # For PyTorch, which would have load_state_dict() call the hooks around all of this once more.
    step.hooked = True  # type: ignore[attr-defined]

    @torch.optim.Optimizer.profile_hook_step
    def _wfbp_apply(self) -> Any:
        """What the hooks of a step are called around: once, however it is carried out."""
        exchange = self._wfbp_sync
        assert exchange is not None
        if not (self._optimizer_step_post_hooks or torch_optimizer._global_optimizer_post_hooks):
            return exchange.step()
        result = exchange.step()
        exchange.flush()  # before the hooks
        return result

    @property
    def _wfbp_wanted(self) -> bool:
        """Whether a hook or the program needs the averages before the step."""
        own = getattr(self, _PRE_HOOKS, None)
        return bool(own or torch_optimizer._global_optimizer_pre_hooks)

    @uncompiled
    @deferring
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

    def _wfbp_show_zeros(self) -> None:
        """Zeros in place of missing gradients; they count as missing."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.show_zeros()

    @uncompiled
    @deferring
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
    @deferring
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those on their way."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.discard()
        self._wfbp_forget_sync()
        super().zero_grad(set_to_none)

    @uncompiled
    @deferring
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; every rank must add the same ones.

        Those that ``named_parameters`` did not name go by their place in the optimizer.
        """
        groups, exchange = self.param_groups, self._wfbp_sync
        if exchange is not None:
            exchange.flush()  # updates that are due are of the groups before
        count = len(groups)
        super().add_param_group(param_group)  # where it refuses the group, all goes on as before
        if exchange is None:
            return
        try:
            self._wfbp_check(self._wfbp_options)
        finally:
            added = groups[count:]
            del groups[count:]  # what is under way is of those before
        exchange.release()
        groups += added
        self._wfbp_renew()

    @deferring
    def set_backward_passes_per_step(self, passes: int) -> None:
        options = replace(self._wfbp_options, passes=passes)
        self._wfbp_check(options)
        self._wfbp_options = options
        if self._wfbp_sync is not None:
            self._wfbp_sync.release()
            self._wfbp_renew()

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names by which ranks match parameters; some programs for Horovod read this."""
        named = named_params(self, self._wfbp_known, complete=False)
        return {param: name for name, param in named}

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
        return self._wfbp_sync.report() if self._wfbp_sync is not None else {}

    @uncompiled
    def stats(self) -> dict[str, Any]:
        return self._wfbp_sync.stats() if self._wfbp_sync is not None else {}

    @property
    @uncompiled
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``torch.amp.GradScaler.step`` before it looks at gradients.

        They must be averaged by then, so that an infinity on one rank makes every rank skip.
        """
        self._wfbp_average_for_scaler()
        return bool(getattr(super(), "_step_supports_amp_scaling", False))

    @deferring
    def _wfbp_average_for_scaler(self) -> None:
        exchange = self._wfbp_sync
        if exchange is not None:
            if self._wfbp_sync_state is not SyncState.PROGRAM:
                exchange.synchronize()
            else:
                exchange.check_no_new_gradients()
                if exchange.holds_shards:
                    exchange.synchronize()
        self._wfbp_sync_state = SyncState.SCALER

    def _wfbp_forget_sync(self) -> None:
        """What was averaged has been used, or is not going to be."""
        self._wfbp_sync_state = SyncState.NOBODY
        self._wfbp_synchronized = False

    def _wfbp_reduce(self) -> None:
        """Close the step, unless that was done."""
        exchange = self._wfbp_sync
        if exchange is not None:
            if self._wfbp_sync_state in (SyncState.NOBODY, SyncState.NO_GRADIENTS):
                exchange.reduce(self._wfbp_wanted)
            else:
                exchange.check_no_new_gradients()
        if self._wfbp_sync_state is not SyncState.SCALER:
            self._wfbp_sync_state = SyncState.PROGRAM

    def _wfbp_release(self, runtime: Runtime | None) -> None:
        """Let the parameters go, because another optimizer is made of the same one, on every rank.

        Raises ``RuntimeError`` if shards of its state were lost with another runtime.
        """
        exchange = self._wfbp_sync
        if exchange is None:
            return
        if exchange.runtime is runtime:
            exchange.release()
        elif exchange.shares_state:
            raise RuntimeError(
                f"the state of this {type(self).__name__} is shared out among ranks of another "
                "process set, or was when wfbp was shut down; take its state_dict() before that "
                "and load it into a new one"
            )

    def _wfbp_evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        if self._wfbp_sync is None:
            return loss
        with self._wfbp_sync.evaluating():
            self.synchronize()
        return self._wfbp_sync.combined_loss(loss)


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    optimizer_sharding: bool | None = None,
    update: str | None = None,
) -> DistributedOptimizerBase:
    """Wrap an optimizer so that it averages gradients over all ranks while backward computes.

    The result is an instance of the optimizer's own class that shares its parameter groups and
    state; use it instead of the original, also for learning-rate schedulers; with more than one
    rank, the original's own ``step()`` is an error from here on. Every rank must call this, for
    the same parameters in the same order.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``, for messages and to match ranks; numbers
            stand in for names where it is missing.
        compression: ``Compression.fp16`` or ``Compression.bf16``: float32 and float64 gradients are
            rounded to that type as they are packed, averaged in float32, and rounded once more;
            half the bytes travel, or fewer. What is too large for float16 becomes infinite, as
            ``GradScaler`` expects. Gathered parameters are exact. By default gradients travel in
            the element type of their parameters.
        backward_passes_per_step: how many ``backward()`` calls precede each ``step()``.
        op: ``Average`` or ``Sum`` of gradients; or ``Adasum``, with a power of two of ranks: each
            rank steps on its own gradients, and what its step changed is combined over the ranks.
        gradient_predivide_factor: for Horovod's programs, with ``Average``; averages are formed in
            float32 at least, so it makes no difference.
        num_groups: for Horovod's programs: a hint that is not followed, because the schedule groups
            gradients.
        groups: for Horovod's programs, lists of parameters; checked, but not followed either.
        sparse_as_dense: whether sparse gradients are made dense. Otherwise they stay sparse: ranks
            exchange indices and values when the step closes, which needs a schedule of all-reduces
            (as ``SparseAdam`` has it anyway).
        process_set: the ranks that average their gradients, each of which must call this; other
            ranks neither communicate nor wait. Numbers of ranks in messages are those in the set.
        schedule: how gradients are grouped: ``auto``, ``oasr``, ``mgwfbp``, ``wfbp``, ``single``
            or ``threshold``; or, decoupled into backward and the next forward, ``dear``,
            ``ipart``, ``independent``, ``hybrid``, ``ps`` or ``ps_layerwise``; by default what
            ``WFBP_SCHEDULE`` says, or ``auto``.
        threshold_bytes: group size of ``threshold``, and of what schedules that have to measure
            begin with; by default ``WFBP_THRESHOLD_BYTES`` or 25 MiB.
        optimizer_sharding: what follows decoupled gradients. True: each rank updates its shard
            of each tensor and holds the state of it alone. False: every rank updates all. By
            default what the optimizer allows, which is found by experiment, and False under
            ``compression``: averaged gradients are gathered in 16 bits, parameters never.
        update: deprecated; ``sharded``, ``replicated`` or ``auto`` stand for
            ``optimizer_sharding`` True, False or None.

    Returns:
        The distributed optimizer.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: not an optimizer, parameters without names, or no whole number where one is
            expected.
        ImportError: ``dear`` without the ``search`` extra.
        ValueError: a bad argument, a parameter that cannot be sent, or a process set that was not
            added or that this rank is not in. (Under ``wfbp.horovod`` it then steps alone.)
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
    config = process.current("DistributedOptimizer()").config
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__qualname__}")
    if isinstance(optimizer, DistributedOptimizerBase):
        raise ValueError(
            f"this {type(optimizer).__name__} is distributed already: use it as it is; to wrap it "
            "anew, pass the optimizer that it was made of"
        )
    _check_horovods(compression, op, gradient_predivide_factor, num_groups)
    _check_groups(groups, optimizer)
    runtime = _runtime_of(process_set)
    known = None if named_parameters is None else named_pairs(named_parameters)
    sharding = optimizer_sharding_of(optimizer_sharding, update)
    if op is Op.ADASUM:
        _check_unplanned(schedule, threshold_bytes, sharding)
        return _wrapped_by_adasum(runtime, optimizer, known, process_set, compression)
    kind = type(optimizer)
    planner = config.schedule if schedule is None else schedule
    limit_bytes = config.threshold_bytes if threshold_bytes is None else threshold_bytes
    options = EngineOptions(
        planner,
        limit_bytes,
        op,
        backward_passes_per_step,
        decouples=True,
        name=kind.__name__,
        wire_dtype=COMPRESSED_DTYPES[compression],
    )
    check_params(named_params(optimizer, known, complete=True), options)
    # What can be refused without looking at the bare optimizer has been: an earlier one goes on.
    unwrap(optimizer, runtime)
    params = (p for group in optimizer.param_groups for p in group["params"])
    if sharding is None and options.wire_dtype and any(p.element_size() > 2 for p in params):
        sharding = False  # averages travel in 16 bits; updated parameters could not
    coupling = chosen_coupling(optimizer, sharding)
    check_schedule(planner, coupling is not UpdateCoupling.COUPLED, kind.__name__)
    made = type(kind.__name__, (AveragingOptimizerBase, kind), {})
    wrapped: AveragingOptimizerBase = made(
        runtime, optimizer, known, options, coupling=coupling, sparse_as_dense=sparse_as_dense
    )
    note_wrapped(optimizer, wrapped, runtime)
    return wrapped


def _wrapped_by_adasum(
    runtime: Runtime | None,
    optimizer: torch.optim.Optimizer,
    known: list[tuple[str, torch.Tensor]] | None,
    process_set: ProcessSet,
    compression: type[Compressor],
) -> AdasumOptimizerBase:
    """An optimizer whose changes are combined by Adasum; collective."""
    kind = type(optimizer)
    named_params(optimizer, known, complete=True)
    unwrap(optimizer, runtime)
    kept = {k: v for k, v in optimizer.__dict__.items() if k not in PATCHED}
    made = type(kind.__name__, (AdasumOptimizerBase, kind), {})
    names = functools.partial(named_params, known=known, complete=False)
    wrapped: AdasumOptimizerBase = made(runtime, optimizer, names, process_set, compression, kept)
    note_wrapped(optimizer, wrapped, runtime)
    return wrapped


def _check_unplanned(schedule: object, threshold_bytes: object, sharding: object) -> None:
    """Raise ``ValueError`` for what Adasum has no use for."""
    given = {
        "schedule": schedule, "threshold_bytes": threshold_bytes, "optimizer_sharding": sharding,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}; with op={Op.ADASUM} no gradients are sent while backward "
                "computes, so there is nothing to plan: leave it out"
            )


def _runtime_of(process_set: ProcessSet) -> Runtime | None:
    """The runtime of an optimizer's ranks; None where it steps alone, as under Horovod.

    Raises ``ValueError`` if the set was not added, or this rank is not in it.
    """
    call = "DistributedOptimizer(process_set=...)"
    if gradient_sync.follows_horovod and not process_set.included():
        return None
    return api.runtime_of(process_set, call)


def _check_groups(groups: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ValueError`` unless these are disjoint lists of the optimizer's parameters."""
    if groups is None or (isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0):
        return
    if not isinstance(groups, list | tuple) or not all(isinstance(g, list | tuple) for g in groups):
        raise ValueError(f"groups is {groups!r}; expected lists of parameters, a number, or None")
    known, seen = param_ids(optimizer), set()
    for number, group in enumerate(groups):
        for place, param in enumerate(group):
            if id(param) not in known:
                raise ValueError(f"groups[{number}][{place}] is none of the optimizer's parameters")
            if id(param) in seen:
                raise ValueError(f"groups[{number}][{place}] is in groups twice; expected once")
            seen.add(id(param))


def _check_horovods(
    compression: object,
    op: object,
    predivide_factor: float,
    num_groups: object,
) -> None:
    """Raise ``ValueError`` for values of Horovod's arguments that cannot be served."""
    if not isinstance(compression, type) or compression not in COMPRESSED_DTYPES:
        raise ValueError(
            f"compression is {getattr(compression, '__name__', compression)}; expected "
            "Compression.none, Compression.fp16 or Compression.bf16: gradients are cast while they "
            "are packed, without calls of a compressor"
        )
    if predivide_factor != 1.0 and op is not Op.AVERAGE:
        raise ValueError(f"gradient_predivide_factor needs op=Average; found {op}")
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 0:
        raise ValueError(f"num_groups is {num_groups!r}; expected a whole number of at least 0")

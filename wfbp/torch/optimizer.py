"""DistributedOptimizer: any PyTorch optimizer, with its gradients averaged over the ranks."""

from __future__ import annotations

import enum
import functools
import logging
import types
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any, TypeVar, cast

import torch
from torch.optim import optimizer as torch_optimizer

from wfbp.core.planners import AUTO, DECOUPLED_SCHEDULES
from wfbp.core.types import Op
from wfbp.runtime import process, signals
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.collectives import api
from wfbp.runtime.collectives.process_sets import ProcessSet, global_process_set
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensors
from wfbp.torch.clipping import Limit
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import COMPRESSED_DTYPES, Compression, Compressor
from wfbp.torch.gradient_sync import OptimizerSync
from wfbp.torch.optimizer_interface import DistributedOptimizerBase, take_place, wrapped_of
from wfbp.torch.updates import is_elementwise

log = logging.getLogger("wfbp")

_NUM_PLACES = 62
"""Names of methods are told apart modulo this, where ranks compare which call ends a step."""


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


def check_params(named: Sequence[tuple[str, torch.Tensor]], options: ReducerOptions) -> None:
    """Raise unless the gradients of these parameters can be reduced with these options.

    Raises:
        ImportError: ``dear`` without the ``search`` extra.
        TypeError: not a whole number where one is expected.
        ValueError: a bad option, or a parameter that cannot be sent.
    """
    for name, param in named:
        tensors.check(name, param)
        grad_dtype = getattr(param, "grad_dtype", param.dtype)
        if param.requires_grad and grad_dtype is not param.dtype:
            raise ValueError(
                f"{name} is {param.dtype} and its grad_dtype is {grad_dtype}; gradients travel in "
                "the element type of their parameters, so set no grad_dtype"
            )
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
    OWN_METHOD = 4
    """A method of the optimizer's own, such as ``first_step()``: gradients that come are averaged
    anew."""


F = TypeVar("F", bound=Callable[..., Any])


def _operation(method: F) -> F:
    """Decorator: run a method within :data:`signals.deferred`, uncompiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with signals.deferred:
            return method(*args, **kwargs)

    uncompiled(method)
    return cast(F, functools.update_wrapper(uncompiled(call), method))


class AveragingOptimizerBase(DistributedOptimizerBase):
    """Averages the gradients of an optimizer before its steps.

    The user's optimizer stays an object of its own, which makes the updates; :meth:`step` calls its
    ``step()``. Its parameters are stepped in parts only if it is known to treat every element by
    itself.
    """

    def __init__(
        self,
        runtime: Runtime | None,
        original: torch.optim.Optimizer,
        known: list[tuple[str, torch.Tensor]] | None,
        options: ReducerOptions,
        *,
        sharded: bool,
        sparse_as_dense: bool,
        lenient: bool,
    ) -> None:
        """Take the original's place; a collective.

        Args:
            runtime: of the process set; None on a rank outside it, which steps alone.
            original: of the class from which this one is derived.
            known: names and parameters as the user gave them, or None.
            options: equal on every rank.
            sharded: whether ranks update shards where gradients are decoupled.
            sparse_as_dense: whether sparse gradients are made dense.
            lenient: whether hyperparameters that differ between ranks are a warning.
        """
        self._wfbp_original = original
        self._wfbp_runtime = runtime
        self._wfbp_known = known
        self._wfbp_options = options
        self._wfbp_sharded = sharded
        self._wfbp_sparse_as_dense = sparse_as_dense
        self._wfbp_lenient = lenient
        self._wfbp_skip = False
        self._wfbp_synchronized = False  # by synchronize() itself, since the step before
        self._wfbp_sync: OptimizerSync | None = None
        previous = wrapped_of(original)
        self._wfbp_renew(getattr(previous, "_wfbp_sync", None), complete=True)
        take_place(self, refuses=runtime is not None and runtime.size > 1)

    def _wfbp_renew(self, previous: OptimizerSync | None, complete: bool = False) -> None:
        """Make a new exchange of gradients, which replaces a previous one; collective."""
        named = named_params(self, self._wfbp_known, complete)
        runtime = self._wfbp_runtime
        if previous is not None and (previous.runtime is not runtime or not previous.exchanges):
            previous = None  # it has let the parameters go
        if runtime is not None and (runtime.size > 1 or runtime.config.exchange_alone):
            self._wfbp_sync = OptimizerSync(
                runtime,
                self._wfbp_original,
                lambda: self._wfbp_bare["step"](),
                named,
                self._wfbp_options,
                sharded=self._wfbp_sharded,
                sparse_as_dense=self._wfbp_sparse_as_dense,
                lenient=self._wfbp_lenient,
                previous=previous,
            )
        elif previous is not None:
            previous.release()
        self._wfbp_forget_sync()
        self._wfbp_ids = param_ids(self)

    def _wfbp_check(self, options: ReducerOptions) -> None:
        """Raise unless the gradients of all parameters can be reduced so."""
        check_params(named_params(self, self._wfbp_known, complete=False), options)

    def _wfbp_read(self, name: str) -> Any:
        """An attribute of the original. A method that its class adds finds averaged gradients."""
        original = self._wfbp_original
        value = getattr(original, name)
        if (
            isinstance(value, types.MethodType)
            and value.__self__ is original
            and not name.startswith("_")
            and not hasattr(torch.optim.Optimizer, name)
        ):
            return functools.partial(self._wfbp_call, value)
        return value

    @_operation
    def _wfbp_call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sync = self._wfbp_sync
        if sync is not None:
            sync.before_state_is_used()
            if sync.open:
                # A rank without gradients goes on, and would meet this step in its next call.
                sync.synchronize(place=1 + zlib.crc32(method.__name__.encode()) % _NUM_PLACES)
                self._wfbp_sync_state = SyncState.OWN_METHOD
        return method(*args, **kwargs)

    @property
    def state(self) -> Any:
        """The state by parameter, after all updates that are due.

        Where ranks update shards, it is by shard; :meth:`state_dict` has the whole.
        """
        if self._wfbp_sync is not None:
            self._wfbp_sync.before_state_is_used()
        return self._wfbp_original.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._wfbp_sync is not None:
            self._wfbp_sync.before_another_state(state)
        self._wfbp_original.state = state

    @_operation
    def synchronize(self) -> None:
        averaged = self._wfbp_sync is None or self._wfbp_sync.synchronize()
        self._wfbp_sync_state = SyncState.PROGRAM if averaged else SyncState.NO_GRADIENTS
        self._wfbp_synchronized = averaged

    @_operation
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

    @_operation
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

    @_operation
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
        sync = self._wfbp_sync
        # A scheduler made of the original watches it for calls of step().
        self._wfbp_original._opt_called = True  # type: ignore[attr-defined]
        if sync is None:
            return self._wfbp_step_alone(closure)
        check_known(self._wfbp_original, self._wfbp_ids)
        if closure is not None:
            try:
                if sync.open:  # an optimizer may use them before it calls the closure
                    sync.synchronize(place=_NUM_PLACES + 1)
                sync.prepare_whole()
                return self._wfbp_bare["step"](lambda: self._wfbp_evaluate(closure))
            finally:
                self._wfbp_forget_sync()
        if not (self._wfbp_skip and self._wfbp_is_averaged()):
            self._wfbp_reduce()
            if self._wfbp_synchronized:
                warnings.warn(
                    # Programs filter for the words of Horovod's that say what was called.
                    f"{type(self).__name__}: optimizer.step() called without "
                    "optimizer.skip_synchronize(), though synchronize() was. Here gradients are "
                    "not averaged twice, but under Horovod they are: write "
                    "`with optimizer.skip_synchronize(): optimizer.step()`",
                    stacklevel=3,
                )
        else:
            sync.check_no_new_gradients()
        self._wfbp_forget_sync()
        return sync.step()

    def _wfbp_step_alone(self, closure: Callable[[], Any] | None) -> Any:
        """Step without other ranks."""
        if closure is not None:
            return self._wfbp_bare["step"](lambda: self._wfbp_evaluate(closure))
        if self._wfbp_skip:
            self._wfbp_is_averaged()
        self._wfbp_forget_sync()
        self._wfbp_make_dense()
        return self._wfbp_bare["step"]()

    def _wfbp_make_dense(self) -> None:
        for group in self.param_groups if self._wfbp_sparse_as_dense else ():
            for param in group["params"]:
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()

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

    def _wfbp_reduce(self) -> None:
        """Close the step, unless that was done."""
        sync, state = self._wfbp_sync, self._wfbp_sync_state
        if sync is not None:
            anew = state is SyncState.OWN_METHOD and sync.open
            if state in (SyncState.NOBODY, SyncState.NO_GRADIENTS) or (
                anew and self._wfbp_options.op is Op.AVERAGE
            ):
                # Hooks that run before the step may look at the averages.
                own = getattr(self, "_optimizer_step_pre_hooks", None)
                sync.reduce(bool(own or torch_optimizer._global_optimizer_pre_hooks))
            else:
                sync.check_no_new_gradients()
        if state is not SyncState.SCALER:
            self._wfbp_sync_state = SyncState.PROGRAM

    def _wfbp_evaluate(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            loss = closure()
        if self._wfbp_sync is None:
            self._wfbp_make_dense()
            return loss
        with self._wfbp_sync.evaluating():
            self.synchronize()
        return self._wfbp_sync.combined_loss(loss)

    def _wfbp_forget_sync(self) -> None:
        """What was averaged has been used, or is not going to be."""
        self._wfbp_sync_state = SyncState.NOBODY
        self._wfbp_synchronized = False

    @_operation
    def state_dict(self) -> dict[str, Any]:
        """The state in the ordinary form, whatever the schedule.

        Any rank may call it, alone. Where ranks hold shards of the state, it is fetched from their
        communication threads; their training threads need not come here.

        Raises:
            DisagreementError: another rank has stepped, loaded or wrapped otherwise.
            WfbpError: ranks failed, or did not answer in time.
        """
        original, bare = self._wfbp_original, self._wfbp_bare["state_dict"]
        whole = None if self._wfbp_sync is None else self._wfbp_sync.whole_state()
        if whole is None:
            return bare()  # type: ignore[no-any-return]
        shards, original.state = original.state, whole  # type: ignore[assignment]
        try:
            return bare()  # type: ignore[no-any-return]
        finally:
            original.state = shards

    def _wfbp_take_whole_state(self) -> None:
        """Hold all of the state until the next step; the others are about to load it."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.take_whole_state()

    @_operation
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer. Every rank must load the same state."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.flush()
        self._wfbp_bare["load_state_dict"](state_dict)
        if self._wfbp_sync is not None:
            self._wfbp_sync.forget_state()

    @_operation
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget all gradients, also those on their way; arguments are those of the optimizer."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.discard()
        self._wfbp_forget_sync()
        self._wfbp_bare["zero_grad"](*args, **kwargs)

    @_operation
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; every rank must add the same ones.

        Those that ``named_parameters`` did not name go by their place in the optimizer.
        """
        sync = self._wfbp_sync
        if sync is not None:
            sync.flush()  # updates that are due are of the groups before
        count = len(self.param_groups)
        self._wfbp_bare["add_param_group"](param_group)
        if sync is not None:
            try:
                self._wfbp_check(self._wfbp_options)
                self._wfbp_renew(sync)
            except BaseException:
                if self._wfbp_sync is sync:
                    del self.param_groups[count:]
                raise

    @_operation
    def set_backward_passes_per_step(self, passes: int) -> None:
        options = replace(self._wfbp_options, passes=passes)
        self._wfbp_check(options)
        self._wfbp_options = options
        if self._wfbp_sync is not None:
            self._wfbp_renew(self._wfbp_sync)

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Names by which ranks match parameters; some programs for Horovod read this."""
        named = named_params(self, self._wfbp_known, complete=False)
        return {param: name for name, param in named}

    @uncompiled
    def report(self) -> dict[str, Any]:
        return self._wfbp_sync.report() if self._wfbp_sync is not None else {}

    @property
    @uncompiled
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``torch.amp.GradScaler.step`` before it looks at gradients.

        They must be averaged by then, so that an infinity on one rank makes every rank skip.
        """
        self._wfbp_average_for_scaler()
        return bool(getattr(self._wfbp_original, "_step_supports_amp_scaling", False))

    @_operation
    def _wfbp_average_for_scaler(self) -> None:
        sync = self._wfbp_sync
        if sync is not None:
            if self._wfbp_sync_state is not SyncState.PROGRAM:
                sync.synchronize()
            else:
                sync.check_no_new_gradients()
                if sync.holds_shards:
                    sync.synchronize()
        self._wfbp_sync_state = SyncState.SCALER


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Op.AVERAGE,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    schedule: str | None = None,
    threshold_bytes: int | None = None,
    optimizer_sharding: bool | None = None,
) -> DistributedOptimizerBase:
    """Wrap an optimizer so that it averages gradients over all ranks while backward computes.

    The result is an instance of the optimizer's own class, and has all its attributes; use it
    instead of the original, also for learning-rate schedulers. With more than one rank, the
    original's own ``step()`` is an error from here on. Every rank must call this, for the same
    parameters in the same order.

    The optimizer takes its ordinary step with whole averaged gradients, unless it treats every
    element by itself, as SGD, Adam and most of PyTorch's do. Those can update shards, and be
    stepped while the next forward runs; see ``optimizer_sharding``.

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
        op: ``Average`` or ``Sum``.
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
        optimizer_sharding: True: each rank updates its shard of each tensor and holds the state of
            it alone, if the schedule decouples. False: every rank updates all. By default True for
            PyTorch's elementwise optimizers (exactly these classes: SGD, Adam, AdamW, NAdam, RAdam,
            Adamax, RMSprop, Rprop, Adagrad, Adadelta, ASGD), and False under ``compression``:
            averaged gradients are gathered in 16 bits, parameters never. For a class of your own
            True promises: the new value of an element depends on its own gradients and state and
            on settings in its group alone; state is kept in ``self.state[p]``, in tensors of the
            shape of ``p`` and in numbers; ``step()`` may be called for some parameters or parts of
            them, and changes nothing else.

    Returns:
        The distributed optimizer.

    Raises:
        NotInitializedError: before ``wfbp.init()``.
        TypeError: not an optimizer, parameters without names, or no whole number where one is
            expected.
        ImportError: ``dear`` without the ``search`` extra.
        ValueError: a bad argument, a parameter that cannot be sent, or a process set that was not
            added or that this rank is not in.
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
    return distribute(
        optimizer,
        named_parameters,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        schedule=schedule,
        threshold_bytes=threshold_bytes,
        optimizer_sharding=optimizer_sharding,
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__qualname__}")
    if isinstance(optimizer, DistributedOptimizerBase):
        raise ValueError(
            f"this {type(optimizer).__name__} is distributed already: use it as it is; to wrap it "
            "anew, pass the optimizer that it was made of"
        )


def distribute(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    *,
    compression: type[Compressor],
    backward_passes_per_step: int,
    op: Op,
    sparse_as_dense: bool,
    process_set: ProcessSet,
    schedule: str | None,
    threshold_bytes: int | None,
    optimizer_sharding: bool | None,
    lenient: bool = False,
) -> DistributedOptimizerBase:
    """As :func:`DistributedOptimizer`. ``lenient``: a rank outside the process set steps alone, and
    hyperparameters that differ between ranks are a warning."""
    call = "DistributedOptimizer(process_set=...)"
    config = process.current("DistributedOptimizer()").config
    check_optimizer(optimizer)
    if not isinstance(compression, type) or compression not in COMPRESSED_DTYPES:
        raise ValueError(
            f"compression is {getattr(compression, '__name__', compression)}; expected "
            "Compression.none, Compression.fp16 or Compression.bf16: gradients are cast while they "
            "are packed, without calls of a compressor"
        )
    sharding = optimizer_sharding
    if not any(sharding is value for value in (True, False, None)):
        raise ValueError(f"optimizer_sharding is {sharding!r}; expected True, False or None")
    alone = lenient and not process_set.included()
    runtime = None if alone else api.runtime_of(process_set, call)
    known = None if named_parameters is None else named_pairs(named_parameters)
    name = type(optimizer).__name__
    options = ReducerOptions(
        config.schedule if schedule is None else schedule,
        config.threshold_bytes if threshold_bytes is None else threshold_bytes,
        op,
        backward_passes_per_step,
        decouples=True,
        name=name,
        wire_dtype=COMPRESSED_DTYPES[compression],
    )
    check_params(named_params(optimizer, known, complete=True), options)
    _check_previous(optimizer, runtime)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    why = _why_whole(optimizer, params, sharding)
    if why:
        if sharding is True:
            raise ValueError(f"optimizer_sharding is True, but {why}; use None or False")
        log.info("%s takes whole steps, after all-reduces: %s", name, why)
        planner = AUTO if options.schedule in DECOUPLED_SCHEDULES else options.schedule
        options = replace(options, decouples=False, schedule=planner)
    elif sharding is None:
        # Averages travel in 16 bits; updated parameters could not.
        sharding = not (options.wire_dtype and any(p.element_size() > 2 for p in params))
    kind = type(optimizer)
    made = type(kind.__name__, (AveragingOptimizerBase, kind), {})
    wrapped: AveragingOptimizerBase = made(
        runtime,
        optimizer,
        known,
        options,
        sharded=bool(sharding) and not why,
        sparse_as_dense=sparse_as_dense,
        lenient=lenient,
    )
    return wrapped


def _why_whole(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], sharding: bool | None
) -> str:
    """Why an optimizer must not be stepped in parts; empty if it may."""
    kinds = {type(p) for p in params} - {torch.nn.Parameter}
    if not is_elementwise(optimizer, sharding):
        return "only PyTorch's elementwise optimizers are stepped in parts"
    if kinds:
        return f"parameters are of class {', '.join(sorted(k.__name__ for k in kinds))}"
    if not all(tensors.is_dense(p) for p in params):
        return "a parameter has gaps in its memory"
    return ""


def _check_previous(optimizer: torch.optim.Optimizer, runtime: Runtime | None) -> None:
    """Raise ``RuntimeError`` if shards of the optimizer's state were lost with another runtime."""
    sync = getattr(wrapped_of(optimizer), "_wfbp_sync", None)
    if sync is not None and sync.runtime is not runtime and sync.shares_state:
        raise RuntimeError(
            f"the state of this {type(optimizer).__name__} is shared out among ranks of another "
            "process set, or was when wfbp was shut down; take its state_dict() before that and "
            "load it into a new one"
        )

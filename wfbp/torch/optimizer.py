"""A distributed optimizer: it takes the place of the optimizer that it is made of, and averages
gradients over the ranks before each step."""

from __future__ import annotations

import enum
import functools
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch.optim import optimizer as torch_optimizer

from wfbp.core.types import Op
from wfbp.errors import DisagreementError, StallError
from wfbp.runtime import signals
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.runtime import Runtime
from wfbp.torch.clipping import Limit
from wfbp.torch.compiling import uncompiled
from wfbp.torch.compression import Choice, wires_of
from wfbp.torch.gradient_sync import OptimizerSync
from wfbp.torch.original import check_params, named_params, take_place, wrapped_of
from wfbp.torch.own_methods import Differentiation, differentiable, is_own_method, resumed_by
from wfbp.torch.state_sharding import SharedOutState
from wfbp.torch.unplanned_exchanges import combined_losses

_NUM_CALLS = 62
"""Names of methods are told apart modulo this, where ranks compare which call ends a step."""


def check_known(optimizer: torch.optim.Optimizer, known: Collection[int]) -> None:
    """Raise ``RuntimeError`` if ``param_groups`` has a parameter whose id is not ``known``."""
    for g, group in enumerate(optimizer.param_groups):
        for k, param in enumerate(group["params"]):
            if id(param) not in known:
                raise RuntimeError(
                    f"{type(optimizer).__name__}: param_groups[{g}]['params'][{k}], of shape "
                    f"{tuple(param.shape)}, was put there after the optimizer was wrapped: its "
                    "gradients are not averaged over the ranks. Add parameters by "
                    "optimizer.add_param_group({'params': [...]}), on every rank"
                )


class SyncState(enum.Enum):
    """The call that asked for the averages of the next step, if any since the last one."""

    # Calls are the same on every rank, a rank's gradients are not: by these states all ranks decide
    # alike whether to communicate.

    NOBODY = 0
    PROGRAM = 1
    """``synchronize()`` or ``clip_grad_norm_()``."""
    SCALER = 2
    """``GradScaler.step()``, which does not tell when it skips the step."""
    NO_GRADIENTS = 3
    """``synchronize()``, when no rank had any gradient: those that come are averaged anew."""
    OWN_METHOD = 4
    """A method of the optimizer's own, such as ``first_step()``: gradients that come, or that the
    program sets, are averaged anew."""


def _closing_call(name: str) -> int:
    """The number of a call that ends a step, by its name."""
    return 1 + zlib.crc32(name.encode()) % _NUM_CALLS


F = TypeVar("F", bound=Callable[..., Any])


def _operation(method: F) -> F:
    """Decorator: run a method within :data:`signals.deferred`, uncompiled, and outside of inference
    mode, whose tensors could not be changed later."""
    deferred = signals.deferred(method)

    @functools.wraps(method)
    def operate(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return deferred(*args, **kwargs)
        return deferred(*args, **kwargs)

    return uncompiled(operate)  # type: ignore[return-value]


# Without ``ABC``: classes that are derived together with it may have another metaclass.
class DistributedOptimizerBase(torch.optim.Optimizer):
    """Base of all results of :func:`DistributedOptimizer`, which also have the optimizer's class.

    ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` are those of any optimizer;
    every rank steps and loads alike, any rank may take the ``state_dict()`` alone. All other
    attributes are those of the optimizer that it was made of, which stays as it is. A method that
    its class adds, such as ``first_step()``, averages new gradients before it runs, and after each
    backward pass that it makes. So does a function that the program stores in it, and a generator
    each time it resumes. Every rank must call it, and all ranks or none must have gradients.

    Example:
        >>> import torch, wfbp.torch as wfbp
        >>> wfbp.init()
        >>> sgd = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
        >>> optimizer = wfbp.DistributedOptimizer(sgd)
        >>> isinstance(optimizer, wfbp.DistributedOptimizerBase), isinstance(optimizer, type(sgd))
        (True, True)
    """

    _wfbp_original: torch.optim.Optimizer
    _wfbp_own: ClassVar[frozenset[str]]
    """Names of attributes that are not the original's."""
    _wfbp_bare: dict[str, Any]
    """The original's own methods that this object replaces; see :func:`take_place`."""
    _wfbp_before: dict[str, Any]
    _wfbp_watched: dict[str, Any]
    """By name, what it has instead of its further methods."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not the user's ``__init_subclass__``, which may register classes by name.
        bases = cls.__mro__[1:]  # what a class itself adds are methods of the original
        ours = [vars(base) for base in bases if issubclass(base, DistributedOptimizerBase)]
        cls._wfbp_own = frozenset[str]().union(*ours)
        if not issubclass(cls.__bases__[0], DistributedOptimizerBase):  # as Lightning derives one
            for name in ("__getattribute__", "__setattr__", "__delattr__"):
                setattr(cls, name, getattr(object, name))

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object that ``__init__`` fills, without what the user's class does here."""
        return object.__new__(cls)

    # Methods of the user's class are in this object's class, too, so that isinstance() holds. They
    # must be looked up on the original: bound methods and ``__dict__`` are its own.
    if not TYPE_CHECKING:  # which would take every name for one that exists

        def __getattribute__(self, name: str) -> Any:
            if name.startswith(("_wfbp_", "__")) or name in type(self)._wfbp_own:
                return object.__getattribute__(self, name)
            return self._wfbp_read(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith(("_wfbp_", "__")) or name in type(self)._wfbp_own:
                object.__setattr__(self, name, value)
            else:
                setattr(self._wfbp_original, name, value)

        def __delattr__(self, name: str) -> None:
            if name.startswith(("_wfbp_", "__")) or name in type(self)._wfbp_own:
                object.__delattr__(self, name)
            else:
                delattr(self._wfbp_original, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a distributed {type(self).__name__} cannot be copied or pickled: it exchanges "
            "gradients with other ranks; copy or save its state_dict()"
        )

    def __init__(
        self,
        runtime: Runtime | None,  # None on a rank outside the process set, which steps alone
        original: torch.optim.Optimizer,  # of the class that this one extends
        known: list[tuple[str, torch.Tensor]] | None,  # as the user gave them
        options: ReducerOptions,
        sparse_as_dense: bool,
        check_parameters: bool = True,
        compression: Choice = "none",  # of parameters that are added
    ) -> None:
        """Take the original's place; a collective."""
        self._wfbp_original = original
        self._wfbp_runtime = runtime
        self._wfbp_known = known
        self._wfbp_options = options
        self._wfbp_choice = compression
        self._wfbp_sparse_as_dense = sparse_as_dense
        self._wfbp_check_parameters = check_parameters
        self._wfbp_skip = False
        self._wfbp_local: list[None] = []  # one entry per no_sync() that the program is in
        self._wfbp_calls: list[str] = []  # methods of the optimizer that run; "" for a closure
        self._wfbp_fell_back = False  # whether the guard of compression has had enough
        self._wfbp_sync: OptimizerSync | None = None
        previous = wrapped_of(original)
        self._wfbp_renew(getattr(previous, "_wfbp_sync", None), complete=True)
        take_place(self, refuses=runtime is not None and runtime.size > 1)

    def _wfbp_renew(self, previous: OptimizerSync | None, complete: bool = False) -> None:
        """Make a new exchange of gradients, which replaces a previous one; collective."""
        named = named_params(self, self._wfbp_known, complete)
        wire, wires = wires_of(self._wfbp_choice, named, self._wfbp_known)
        options = replace(self._wfbp_options, wire=wire, wires=wires)
        before = self._wfbp_sync  # none where another object was wrapped
        if before is not None and before.reducer.fell_back:
            self._wfbp_fell_back = True
        self._wfbp_options = options.in_16_bits() if self._wfbp_fell_back else options
        runtime = self._wfbp_runtime
        if previous is not None and (previous.runtime is not runtime or previous.successor):
            previous = None  # it has let the parameters go
        if runtime is not None and (runtime.size > 1 or runtime.config.exchange_alone):
            self._wfbp_sync = OptimizerSync(
                runtime,
                self._wfbp_original,
                lambda *args, **kwargs: self._wfbp_bare["step"](*args, **kwargs),
                named,
                self._wfbp_options,
                local=self._wfbp_local,
                calls=self._wfbp_calls,
                after_backward=self._wfbp_after_backward,
                sparse_as_dense=self._wfbp_sparse_as_dense,
                check_parameters=self._wfbp_check_parameters,
                on_difference=self._wfbp_differs,
                previous=previous,
            )
        elif previous is not None:
            previous.release()
        self._wfbp_sync_state = SyncState.NOBODY
        self._wfbp_ids = {id(p) for group in self.param_groups for p in group["params"]}

    def _wfbp_differs(self, error: DisagreementError) -> None:
        """Ranks have different hyperparameters or parameters before the first step."""
        raise error

    def _wfbp_check(self, options: ReducerOptions) -> None:
        """Raise unless the gradients of all parameters can be reduced so."""
        check_params(named_params(self, self._wfbp_known, complete=False), options)

    def _wfbp_read(self, name: str) -> Any:
        """An attribute of the original. Its further methods see averaged gradients."""
        original = self._wfbp_original
        value = getattr(original, name)
        if is_own_method(original, name, value):
            return functools.partial(self._wfbp_call, name, value)
        return value

    @_operation
    def _wfbp_call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sync = self._wfbp_sync
        failed = name == "__exit__" and args[:1] != (None,)  # other ranks may not wait
        if sync is None or failed:
            with self._wfbp_within(name):
                result = method(*args, **kwargs)
        else:
            steps = sync.reducer.num_steps
            averaged = self._wfbp_average_for(name, sync)
            end: StopIteration | None = None
            with self._wfbp_within(name), sync.differentiation() as differentiation:
                try:
                    result = method(*args, **kwargs)
                except StopIteration as error:  # a generator has run to its end
                    end = error
            self._wfbp_note_gradients(name, differentiation)
            if averaged or sync.reducer.num_steps > steps:  # else this rank may be alone
                sync.note_parameters()
            if end is not None:
                raise end
        if result is self._wfbp_original:
            return self
        call = functools.partial(functools.partial, self._wfbp_call, name)
        return resumed_by(call, functools.partial(self._wfbp_within, name), result)

    def _wfbp_average_for(self, name: str, sync: OptimizerSync) -> bool:
        """Average new gradients before a further method runs; whether there are averages."""
        sync.update.make_whole()
        has_averages = True
        if self._wfbp_has_new(sync):
            # A rank without gradients continues, and would meet this step in its next call.
            try:
                sync.synchronize(_closing_call(name))
            except StallError as error:
                raise StallError(
                    f"{error} This rank called {name}(), which averages its new "
                    "gradients first; a rank without any does not wait there. Call it after "
                    "step() or zero_grad(), or with gradients on every rank"
                ) from error
            self._wfbp_sync_state = SyncState.OWN_METHOD
        elif self._wfbp_sync_state is SyncState.PROGRAM:
            sync.check_no_new_gradients()
            if sync.held is not None:
                sync.synchronize()
            self._wfbp_sync_state = SyncState.OWN_METHOD
        else:
            has_averages = False
        if has_averages:
            sync.use_averages()
        sync.note_gradients()
        return has_averages

    def _wfbp_note_gradients(self, name: str, differentiation: Differentiation) -> None:
        """After a further method, only gradients that it has set by differentiation are new;
        ``RuntimeError`` if it has used them."""
        sync = self._wfbp_sync
        if sync is None:
            return
        if differentiation.has_updated() and not self._wfbp_skip:
            raise RuntimeError(
                f"{type(self).__name__}: {name}() has updated parameters by gradients that it "
                "computed by torch.autograd.grad(), which are this rank's own: ranks differ from "
                "here on. Call backward() in it, whose gradients are averaged at once; or average "
                f"them by wfbp.allreduce(), and call {name}() inside 'with "
                "optimizer.skip_synchronize():'"
            )
        if not (differentiation.happened and sync.has_new()):
            sync.note_gradients()

    @contextmanager
    def _wfbp_within(self, call: str) -> Iterator[None]:
        """While a method of the optimizer runs, or a closure (an empty name)."""
        self._wfbp_calls.append(call)
        try:
            yield
        finally:
            self._wfbp_calls.pop()

    def _wfbp_after_backward(self) -> None:
        """A method of the optimizer has run backward, and may use the gradients at once."""
        if self._wfbp_sync is not None and self._wfbp_sync.open:
            self._wfbp_sync.average_within(_closing_call(f"backward in {self._wfbp_calls[-1]}"))
            self._wfbp_sync.use_averages()
            self._wfbp_sync.note_gradients()
            self._wfbp_sync_state = SyncState.OWN_METHOD

    def _wfbp_has_new(self, sync: OptimizerSync) -> bool:
        """Whether this rank has gradients that were not averaged, by backward or set by the program
        (which may also change averages after ``synchronize()``)."""
        self._wfbp_settle(sync)
        is_programs = self._wfbp_sync_state is SyncState.PROGRAM
        return sync.open if is_programs else sync.has_new()

    def _wfbp_settle(self, sync: OptimizerSync) -> None:
        """See whether a scaler has skipped the step for which it had gradients averaged."""
        if self._wfbp_sync_state is SyncState.SCALER and sync.has_moved_on():
            self._wfbp_sync_state = SyncState.NOBODY

    @property
    def state(self) -> Any:
        """The state by parameter.

        If ranks update shards, each holds its shards only; :meth:`state_dict` has the whole, and
        to look for the state of such a parameter here is a ``RuntimeError``.
        """
        state = self._wfbp_original.state
        if self._wfbp_sync is None:
            return state
        return self._wfbp_sync.update.state_for_use(state)

    @state.setter
    def state(self, state: Any) -> None:
        if isinstance(state, SharedOutState):
            state = state.data
        if self._wfbp_sync is not None:
            self._wfbp_sync.update.before_another_state(state)
        self._wfbp_original.state = state

    @_operation
    def synchronize(self) -> None:
        """Wait until all gradients of this step are averaged; ``p.grad`` then holds the averages.

        Use it before reading or changing gradients, and step inside :meth:`skip_synchronize`;
        to clip them, :meth:`clip_grad_norm_` costs less. Parameters that still travel are waited
        for, too; for them alone call :meth:`synchronize_parameters`. Every rank must call it.

        Raises:
            RuntimeError: gradients were changed in place since backward.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        self._wfbp_synchronize()

    def _wfbp_synchronize(self, evaluates: bool = False) -> None:
        """As :meth:`synchronize`; ``evaluates``: at the end of a closure."""
        sync = self._wfbp_sync
        averaged = sync is None or self._wfbp_has_sums() or sync.synchronize(evaluates=evaluates)
        self._wfbp_sync_state = SyncState.PROGRAM if averaged else SyncState.NO_GRADIENTS
        if sync is not None:
            sync.note_averages()

    def _wfbp_has_sums(self) -> bool:
        """Whether gradients are whole sums already, which must not be added up again."""
        sync, state = self._wfbp_sync, self._wfbp_sync_state
        if sync is None or self._wfbp_options.op is Op.AVERAGE:
            return False
        if state is SyncState.OWN_METHOD:
            return not sync.has_new()
        if state is not SyncState.PROGRAM:
            return False
        sync.check_no_new_gradients()
        sync.update.flush()
        return sync.held is None

    @_operation
    def synchronize_parameters(self) -> None:
        """Wait until all parameters are up to date.

        With a schedule that decouples, some may still be on their way after ``step()``. Reading one
        waits for it, so this is needed only before code that PyTorch does not notice: CUDA graphs,
        addresses kept elsewhere, and C++ extensions that are given a parameter outside the forward
        of its module. Any rank may call it, alone.

        Raises:
            WfbpError: ranks failed, or did not answer in time.
        """
        if self._wfbp_sync is not None:
            self._wfbp_sync.update.flush()

    @uncompiled
    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it, ``step()`` takes gradients as they are: they have been synchronized.

        It may be entered around a single step, or once around all of training.

        Raises:
            RuntimeError: at a ``step()`` with gradients for which :meth:`synchronize` was not
                called since backward.
        """
        outer, self._wfbp_skip = self._wfbp_skip, True
        try:
            yield
        finally:
            self._wfbp_skip = outer

    @uncompiled
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, ``backward()`` accumulates gradients on this rank, without sending them.

        For a number of passes that varies from step to step. The first pass after it sends what
        has accumulated, while it computes. ``step()`` sends whatever no pass has sent, so a step
        whose passes are all within it is right, but sends everything after backward.

        Example:
            >>> import torch, wfbp.torch as wfbp
            >>> wfbp.init()
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = wfbp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> batches = [torch.ones(4, 2)] * 3
            >>> with optimizer.no_sync():
            ...     for batch in batches[:-1]:
            ...         model(batch).sum().backward()
            >>> model(batches[-1]).sum().backward()
            >>> optimizer.step()

        Raises:
            RuntimeError: on entering, with ``backward_passes_per_step`` above 1; at a ``step()``
                within.
        """
        if self._wfbp_options.passes > 1:
            raise RuntimeError(
                f"{type(self).__name__}: no_sync() needs backward_passes_per_step=1, found "
                f"{self._wfbp_options.passes}: the first pass outside no_sync() ends a step"
            )
        self._wfbp_local.append(None)
        try:
            yield
        finally:
            self._wfbp_local.pop()

    @_operation
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm over all parameters is at most ``max_norm``.

        To be called between ``backward()`` and ``step()``, on every rank. Does what
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
            self._wfbp_make_dense()
            params = [p for group in self.param_groups for p in group["params"]]
            return torch.nn.utils.clip_grad_norm_(params, *astuple(limit))
        if self._wfbp_sync_state is SyncState.SCALER:  # a scaler that has skipped its step
            self._wfbp_sync_state = SyncState.NOBODY
        is_reduced_here = self._wfbp_reduce(self._wfbp_sync)
        return self._wfbp_sync.clip_grad_norm_(limit, is_reduced_here)

    @_operation
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Average the gradients, unless that was done, and let the optimizer step.

        A signal that arrives meanwhile is handled at the end, so that ranks stay equal if only one
        of them gets it. An exception that its handler raises, such as ``KeyboardInterrupt``,
        propagates from a complete step. If this rank has waited for the others for a second, the
        handler runs in the middle of the step.

        Args:
            closure: computes the loss of this rank's data and its gradients; called by the
                optimizer, as often as it likes, on every rank alike. The optimizer is given the
                loss of all ranks, averaged (or added up, with ``op=Sum``) as the gradients are. In
                a tuple, list or dict, floats and floating tensors without dimensions are losses.
            args, kwargs: further arguments of the optimizer's own step, the same on every rank. The
                optimizer then takes one step with whole parameters.

        Returns:
            The return value of the optimizer's step: for most, the averaged loss of the first call.

        Raises:
            RuntimeError: gradients were changed since backward, or a parameter was put into
                ``param_groups`` without :meth:`add_param_group`.
            TypeError: a further argument is a function, whose result would be this rank's alone.
            DisagreementError: ranks passed different further arguments, or their parameters have
                drifted apart.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        sync = self._wfbp_sync
        if self._wfbp_local:
            raise RuntimeError(
                f"{type(self).__name__}: step() within no_sync(); end its block first"
            )
        # A scheduler made of the original watches it for calls of step().
        self._wfbp_original._opt_called = True  # type: ignore[attr-defined]
        if sync is not None:
            check_known(self._wfbp_original, self._wfbp_ids)
        if callable(closure) and not isinstance(closure, torch.nn.Module):
            return self._wfbp_step_with(closure, *args, **kwargs)
        further = (closure, *args) if closure is not None or args else ()
        if sync is not None:
            self._wfbp_settle(sync)
        averaged = self._wfbp_skip and self._wfbp_is_averaged()
        if sync is None:
            self._wfbp_sync_state = SyncState.NOBODY
            self._wfbp_make_dense()
            with self._wfbp_within("step"):
                return self._wfbp_bare["step"](*further, **kwargs)
        if averaged:
            sync.check_no_new_gradients()
        else:
            self._wfbp_reduce(sync, whole=bool(further or kwargs))
        try:
            with self._wfbp_within("step"):
                sync.forget_parameters()
                result = sync.step(*further, **kwargs)
        finally:
            self._wfbp_sync_state = SyncState.NOBODY
        sync.note_gradients()
        sync.note_parameters()
        return result

    def _wfbp_step_with(self, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """A step that computes gradients by a closure."""
        sync = self._wfbp_sync
        try:
            if sync is not None:
                if self._wfbp_has_new(sync):  # an optimizer may use them before it calls closure()
                    sync.synchronize(closing_call=_NUM_CALLS + 1)
                    sync.use_averages()
                sync.prepare_whole()
                sync.compare_arguments(args, kwargs)
            with self._wfbp_within("step"):
                evaluate = functools.partial(self._wfbp_evaluate, closure)
                return self._wfbp_bare["step"](evaluate, *args, **kwargs)
        finally:
            self._wfbp_sync_state = SyncState.NOBODY
            if sync is not None:
                sync.note_gradients()
                sync.note_parameters()

    def _wfbp_make_dense(self) -> None:
        for group in self.param_groups if self._wfbp_sparse_as_dense else ():
            for param in group["params"]:
                if param.grad is not None and param.grad.is_sparse:
                    param.grad = param.grad.to_dense()

    def _wfbp_is_averaged(self) -> bool:
        """Whether a step that skips synchronizing has averages; error if others are there."""
        if self._wfbp_sync_state is not SyncState.NOBODY:
            return True
        if self._wfbp_sync is not None:
            has_gradients = self._wfbp_sync.open
        else:
            has_gradients = any(p.grad is not None for g in self.param_groups for p in g["params"])
        if has_gradients:
            raise RuntimeError(
                f"{type(self).__name__}: step() within skip_synchronize() takes gradients as they "
                "are, and those of this step were not averaged: call optimizer.synchronize() "
                "before it"
            )
        return False

    def _wfbp_reduce(self, sync: OptimizerSync, whole: bool = False) -> bool:
        """Close the step, unless that was done; returns whether it was closed here."""
        state = self._wfbp_sync_state
        anew = state is SyncState.OWN_METHOD and sync.has_new()
        closes = state in (SyncState.NOBODY, SyncState.NO_GRADIENTS) or (
            anew and self._wfbp_options.op is Op.AVERAGE
        )
        if closes:
            # Hooks that run before the step may look at the averages.
            own = getattr(self, "_optimizer_step_pre_hooks", None)
            sync.reduce(whole or bool(own or torch_optimizer._global_optimizer_pre_hooks))
        else:
            sync.check_no_new_gradients(assigned=anew)
        if state is not SyncState.SCALER:
            self._wfbp_sync_state = SyncState.PROGRAM
        return closes

    def _wfbp_evaluate(self, closure: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sync = self._wfbp_sync
        if sync is not None and self._wfbp_options.op is Op.SUM:
            # Earlier gradients are sums already, and will be added up again.
            for grad in (p.grad for group in self.param_groups for p in group["params"]):
                if grad is not None:
                    grad.detach().div_(sync.runtime.size)
        self._wfbp_sync_state = SyncState.NOBODY
        with torch.enable_grad(), self._wfbp_within(""):
            loss = closure(*args, **kwargs)
        if sync is None:
            self._wfbp_make_dense()
            return loss
        self._wfbp_synchronize(evaluates=True)
        sync.use_averages()
        combined = combined_losses(sync.reducer, loss, self._wfbp_options.op is Op.AVERAGE)
        this = weakref.ref(sync)  # the program may keep the loss
        return differentiable(loss, combined, lambda: (sync := this()) is None or sync.open)

    @_operation
    def state_dict(self) -> dict[str, Any]:
        """The state in the ordinary form, whatever the schedule.

        Any rank may call it, alone. If ranks hold shards of the state, their communication threads
        send them; their training threads need not call this.

        Raises:
            DisagreementError: another rank has stepped, loaded or wrapped otherwise.
            WfbpError: ranks failed, or did not answer in time.
        """
        original, bare = self._wfbp_original, self._wfbp_bare["state_dict"]
        whole = None if self._wfbp_sync is None else self._wfbp_sync.update.whole_state()
        if whole is None:
            return bare()  # type: ignore[no-any-return]
        shards, original.state = original.state, whole  # type: ignore[assignment]
        try:
            return bare()  # type: ignore[no-any-return]
        finally:
            original.state = shards

    @_operation
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the optimizer. Every rank must load the same state."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.update.flush()
        self._wfbp_bare["load_state_dict"](state_dict)
        if self._wfbp_sync is not None:
            self._wfbp_sync.update.forget()
            self._wfbp_sync.reducer.used_scale = 0.0

    @_operation
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget all gradients, including those being sent; arguments are the optimizer's own."""
        if self._wfbp_sync is not None:
            self._wfbp_sync.discard()
        self._wfbp_sync_state = SyncState.NOBODY
        self._wfbp_bare["zero_grad"](*args, **kwargs)
        if self._wfbp_sync is not None:
            self._wfbp_sync.note_gradients()

    @_operation
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; every rank must add the same ones.

        Those that ``named_parameters`` did not name go by their place in the optimizer.
        """
        sync = self._wfbp_sync
        self._wfbp_check_between_steps("add_param_group()")
        if sync is not None:
            sync.update.flush()  # what is under way belongs to the groups before
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

    def _wfbp_check_between_steps(self, what: str) -> None:
        sync, state = self._wfbp_sync, self._wfbp_sync_state
        averaged = state in (SyncState.PROGRAM, SyncState.OWN_METHOD)
        sums = averaged and self._wfbp_options.op is Op.SUM
        if sync is not None and (sync.held is not None or sums):
            raise RuntimeError(
                f"{type(self).__name__}: {what} between clip_grad_norm_() or synchronize() and "
                "step() would forget what these have done; call it after step() or zero_grad()"
            )

    @_operation
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Have another number of ``backward()`` calls precede each step from now on.

        To be called between a step and the next backward, on every rank alike. Plans are made anew.

        Raises:
            TypeError: not a whole number.
            ValueError: less than 1.
        """
        options = replace(self._wfbp_options, passes=passes)
        self._wfbp_check(options)
        self._wfbp_check_between_steps("set_backward_passes_per_step()")
        self._wfbp_options = options
        if self._wfbp_sync is not None:
            self._wfbp_renew(self._wfbp_sync)

    @uncompiled
    def report(self) -> dict[str, Any]:
        """The plan in use, and how training goes; empty with one rank.

        Returns:
            Plain values; None if not yet known.

            * ``schedule``, ``plan`` (in words), ``plan_digest``, ``overlap`` (whether messages are
              sent during backward), ``num_groups`` (messages), ``num_tensors``, ``total_bytes`` (in
              messages, per step), ``sent_as`` (``elements`` and ``bytes`` of these by type).
            * ``phase``: ``warm-up``, ``profile``, ``trial`` or ``installed``; ``steps`` so far.
            * In seconds: ``measured_iteration_s`` and ``exposed_s`` (waiting for communication),
              medians of the last steps; ``predicted_iteration_s``, ``predicted_exposed_s``, and
              ``lower_bound_s``, which no plan can beat.
            * ``compression_sample``: of the guard, its ``step``, ``tensor``, ``cosine``,
              ``relative_error`` and ``kept_error`` (what the next step makes up for, relative).
            * ``ratio_to_lower_bound``: T/LB; ``kappa``: interference of communication with compute.
        """
        return self._wfbp_sync.reducer.report() if self._wfbp_sync is not None else {}

    @property
    @uncompiled
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``GradScaler.step`` before it looks at gradients."""
        # Averaged by then, an infinity on one rank makes every rank skip.
        self._wfbp_average_for_scaler()
        return bool(getattr(self._wfbp_original, "_step_supports_amp_scaling", False))

    @_operation
    def _wfbp_average_for_scaler(self) -> None:
        sync = self._wfbp_sync
        if sync is not None:
            if self._wfbp_sync_state is SyncState.PROGRAM:
                sync.check_no_new_gradients()
                if sync.held is not None:
                    sync.synchronize()
            elif not self._wfbp_has_sums():
                sync.synchronize()
            sync.note_gradients(force=True)
        self._wfbp_sync_state = SyncState.SCALER

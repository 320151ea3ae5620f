"""The optimizer's update after gradients have been reduced.

Most optimizers take one ordinary ``step()`` with whole gradients. Only an optimizer that is known
to treat every element by itself (see :mod:`wfbp.torch.wrapping`) is stepped in parts. Each rank
updates its shards of decoupled parameters, which are then gathered. Or every rank updates every
parameter, decoupled ones just before they are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import optim
from torch._functorch import pyfunctorch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _python_dispatch

from wfbp.runtime.reducer import Reducer
from wfbp.runtime.step import BufferView
from wfbp.torch import tensors
from wfbp.torch.pending import PendingParameters
from wfbp.torch.state_sharding import State, StateSharding, ordered

Reduced = Sequence[BufferView | None]
Group = dict[str, Any]


def bare_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class, without the calls of hooks that PyTorch has put around it."""
    step: Any = kind.step
    # functools.wraps copies the mark to a program's decorators, which are no such wrapper.
    by_torch = getattr(step, "__globals__", {}).get("__name__") == torch_optimizer.__name__
    return step.__wrapped__ if by_torch and getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


_EARLY = 8
"""The first groups that hold this part of what is gathered are updated before the rest."""


class Update:
    """Steps an optimizer whose gradients a reducer has reduced.

    The training thread steps. A thread that reads a parameter waits, through ``pending``, and
    carries out the rest of its update.
    """

    def __init__(
        self,
        reducer: Reducer,
        optimizer: optim.Optimizer,  # the program's own; its groups say what is stepped, and how
        step_whole: Callable[[], Any],  # for whole gradients, parameters and state
        params: Sequence[torch.Tensor],  # the reducer's, by index
        sharding: StateSharding | None,  # where ranks update shards
        name: str,
    ) -> None:
        self._reducer = reducer
        self._optimizer = optimizer
        self._step_whole = step_whole
        self._bare_step = bare_step(type(optimizer))
        self._params = params
        self._device_type = params[0].device.type
        self._index = {id(p): k for k, p in enumerate(params)}
        self.sharding = sharding
        self._installed = 0
        self._early: tuple[set[int], int] = set(), 0
        # Of a replicated update whose gradients are being gathered.
        self._layouts = [tensors.Layout.of(p) for p in params]
        self._due: dict[int, _Due] = {}
        self._snapshot: tuple[dict[str, Any], list[Group]] = {}, []
        self._name = name
        self.pending = PendingParameters(params, reducer.await_tensor, self._complete, name)

    def flush(self) -> None:
        """Wait until every parameter is up to date, and all that was gathered has arrived."""
        self.pending.wait_all()
        self._reducer.flush()

    def apply(self, reduced: Reduced | None) -> Any:
        """Step, begin the all-gathers that the plan needs, and return the optimizer's result.

        ``reduced`` is None where every ``p.grad`` is whole.
        """
        if self._reducer.decoupled:
            self.flush()
        if self.sharding is not None:
            self._follow(self.sharding)
            self.sharding.begin_update()
            try:
                if self.sharding:
                    self.sharding.check()
                    return self._with_hooks(partial(self._step_shards, reduced))
                return self._step_whole()
            finally:
                self.sharding.publish()
        if reduced is None:
            return self._step_whole()
        return self._with_hooks(partial(self._defer, reduced))

    def make_whole(self) -> None:
        """Have whole parameters and state on every rank, and whole updates until the next
        :meth:`apply`; a collective if the state is sharded."""
        self.flush()
        if self.sharding is not None:
            self.sharding.follow([])
            self._installed = 0

    def whole_state(self) -> State | None:
        """The whole state if ranks hold shards of it; any rank may ask, alone."""
        self.flush()
        return self.sharding.whole_state() if self.sharding else None

    def take_whole_state(self) -> None:
        """Let the state be whole here; on the other ranks it is about to be replaced by this."""
        if (whole := self.whole_state()) is not None:
            state = self._optimizer.state
            state.clear()
            state.update(whole)
        self.forget()

    def before_state_is_used(self) -> None:
        """The program looks up state: replicated updates that are due come first."""
        if self.sharding is None:
            self.pending.wait_all()

    def before_another_state(self, state: State) -> None:
        """The optimizer is given other state: updates that are due belong to that before."""
        self.flush()
        if self.sharding is not None and not self.sharding.lies_in(state):
            self.forget()

    def forget(self) -> None:
        """The optimizer's state is whole, because another one was loaded."""
        if self.sharding is not None:
            self.sharding.forget()
            self._installed = 0

    def let_go(self) -> None:
        """Leave the parameters, arrived or not, and the optimizer's state to other objects."""
        self.pending.release()
        if self.sharding is not None:
            self.sharding.withdraw_mark()

    def _with_hooks(self, act: Callable[[], Any]) -> Any:
        """Step parts of the tensors, with the hooks of one step around all of it."""
        own = self._optimizer
        if not hasattr(own, "_optimizer_step_pre_hooks"):
            return act()  # its class never called the base class's constructor
        looked_at = own._optimizer_step_post_hooks or torch_optimizer._global_optimizer_post_hooks

        def step(optimizer: optim.Optimizer) -> Any:
            result = act()
            if looked_at:
                self.flush()
            return result

        return optim.Optimizer.profile_hook_step(step)(own)

    def _run(
        self,
        attributes: dict[str, Any],
        groups: Sequence[Group],
        targets: Mapping[int, torch.Tensor],  # by the id of the parameter that each stands for
    ) -> Any:
        """Step some tensors, by an optimizer of the same class with these attributes and groups."""
        parts = [
            {**group, "params": [targets[id(p)] for p in group["params"] if id(p) in targets]}
            for group in groups
        ]
        stepped: Any = object.__new__(type(self._optimizer))
        stepped.__dict__.update(attributes)
        stepped.param_groups = [part for part in parts if part["params"]]
        return self._bare_step(stepped)

    # Shards.

    def _step_shards(self, reduced: Reduced | None) -> Any:
        reducer, sharding = self._reducer, self.sharding
        assert sharding is not None
        start = reducer.clock.start_update()
        attributes, groups = vars(self._optimizer), self._optimizer.param_groups
        addresses = [p.data_ptr() for p in self._params]
        early, count = self._early
        gathers = False
        try:
            targets = {id(p): self._target(p, reduced) for g in groups for p in g["params"]}
            gradients: Sequence[object] = reduced or [p.grad for p in self._params]
            torch.autograd.graph.increment_version(
                [self._params[k] for k in sharding.indices if gradients[k] is not None]
            )
            if early:
                self._run(attributes, groups, {k: targets.pop(k) for k in early if k in targets})
            reducer.gather(addresses, self._params, count)
            gathers = True
            result = self._run(attributes, groups, targets)
        finally:
            # Even if the optimizer raised: every rank must see what it did to its shards.
            if gathers:
                reducer.gather_rest()
            else:
                reducer.gather(addresses, self._params)
            self.pending.begin(sharding.indices, reducer.gather_groups, addresses)
            sharding.drop_gradients()
            sharding.publish()
        reducer.clock.mark_update(start)
        return result

    def _target(self, param: torch.Tensor, reduced: Reduced | None) -> torch.Tensor:
        """The tensor that the optimizer steps for a parameter: itself or its shard."""
        # Empty shards too, without gradients: an optimizer may count the steps of a group.
        sharding, index = self.sharding, self._index.get(id(param), -1)
        assert sharding is not None
        if index not in sharding:
            if not param.numel() and param.grad is None and reduced and reduced[index] is not None:
                param.grad = torch.empty_like(param)  # as where another rank has it
            return param
        shard = sharding.shard(index)
        slot = None if reduced is None else reduced[index]
        if shard.numel() and slot is not None and not slot.whole:
            shard.grad = tensors.shared(slot.data).view(param.dtype).view(shard.shape)
        elif shard.numel() and param.grad is not None and (reduced is None or slot is not None):
            whole = tensors.flat(ordered(param, param.grad))
            shard.grad = sharding.part(index, whole).view(shard.shape)
        return shard

    def _follow(self, sharding: StateSharding) -> None:
        """Shard what the installed plan decouples; collective if that has changed."""
        reducer = self._reducer
        if self._installed == reducer.num_installed:
            return
        self._installed = reducer.num_installed
        # Empty parameters are stepped on every rank, because optimizers have state for them, too.
        some = [k for k, p in enumerate(self._params) if p.numel()]
        sharding.follow([k for k in some if reducer.decouples_tensor(k)])
        # Forward's first parameters are updated first: their all-gathers hide the other updates.
        groups = reducer.gather_groups
        sizes = [sum(self._params[k].nbytes for k in group) for group in groups]
        count = 0
        while sum(sizes[:count]) * _EARLY < sum(sizes) and count < len(sizes) - 1:
            count += 1
        self._early = {id(self._params[k]) for group in groups[:count] for k in group}, count

    # Whole parameters, updated before they are read.

    def _defer(self, reduced: Reduced) -> Any:
        """Gather gradients, step what is not gathered, and leave the rest to :meth:`_complete`."""
        reducer, params, optimizer = self._reducer, self._params, self._optimizer
        # The program may go on with its own gradients where an earlier step left averages.
        grads = (p.grad for p in params)
        kept = {g.data_ptr() for g in grads if g is not None and g.layout is torch.strided}
        whole = reducer.gather_gradients(reduced, kept)
        groups = [{k: _copied(v) for k, v in group.items()} for group in optimizer.param_groups]
        self._snapshot = dict(vars(optimizer)), groups
        now: dict[int, torch.Tensor] = {}
        for index, (param, slot) in enumerate(zip(params, whole, strict=True)):
            if not reducer.decouples_tensor(index):
                now[id(param)] = param
            elif slot is not None:
                gradient = tensors.view(slot.data, self._layouts[index])
                marks = _marks(optimizer.state.get(param))
                self._due[index] = _Due(param.detach(), gradient, marks)
        waiting = list(self._due)
        torch.autograd.graph.increment_version([params[k] for k in waiting])
        start = reducer.clock.start_update()
        try:
            return self._run(vars(optimizer), optimizer.param_groups, now)
        finally:
            reducer.clock.mark_update(start)
            self.pending.begin(waiting, reducer.gather_groups, [p.data_ptr() for p in params])

    def _complete(self, indices: Sequence[int]) -> None:
        """Update parameters whose gradients have arrived; in the thread that reads one."""
        if self.sharding is not None:
            return
        # While torch.compile traces a function, PyTorch's optimizers compute otherwise.
        compiler: Any = torch.compiler
        flag, compiler._is_compiling_flag = getattr(compiler, "_is_compiling_flag", False), False
        try:
            _outside_modes(lambda: self._step_due(indices))
        finally:
            compiler._is_compiling_flag = flag
        self._reducer.memory.publish()

    def _step_due(self, indices: Sequence[int]) -> None:
        """Step some parameters with the settings from when the step was asked for."""
        # By aliases: gradients that the program has computed meanwhile stay the parameters'.
        start = self._reducer.clock.start_update()
        attributes, groups = self._snapshot
        own, state = self._optimizer.state, defaultdict[torch.Tensor, Any](dict)
        due = {self._params[k]: self._due.pop(k) for k in indices}
        # The thread that reads a parameter may be in a mode that step() was not called in.
        plainly = torch.autocast(self._device_type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), plainly:
            for param, (alias, gradient, marks) in due.items():
                alias.grad = gradient
                if _marks(own.get(param)) != marks:
                    raise RuntimeError(
                        f"{self._name}: the optimizer's state of a parameter was changed before "
                        "its update, which waits until the parameter is used. Look up "
                        "optimizer.state again after each step(), or pass schedule='oasr'"
                    )
                if param in own:
                    state[alias] = own[param]
            targets = {id(param): alias for param, (alias, *_) in due.items()}
            self._run({**attributes, "state": state}, groups, targets)
        for param, (alias, *_) in due.items():
            if alias in state:
                own[param] = state[alias]
        self._reducer.clock.mark_update(start)


class _Due(NamedTuple):
    """An update that is left for later: an alias of the parameter, the gradient that is under way,
    and marks of the state from before."""

    alias: torch.Tensor
    gradient: torch.Tensor
    marks: list[Any]


def _marks(entry: dict[Any, Any] | None) -> list[Any]:
    """Marks that differ once a program has changed a parameter's state, which it may have kept."""
    return [
        (key, id(value), value._version) if isinstance(value, torch.Tensor) else (key, value)
        for key, value in (entry or {}).items()
    ]


def _copied(value: Any) -> Any:
    """A setting that changes neither with the group's own nor that with it."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value


def _outside_modes(act: Callable[[], Any]) -> Any:
    """Call a function where no mode and no transform (``torch.func``) affects tensors."""
    functorch: Any = torch._C._functorch
    counts: Any = torch._C
    if functorch.peek_interpreter_stack() is None and not (
        counts._len_torch_dispatch_stack() or counts._len_torch_function_stack()
    ):
        return act()
    outside_transforms: Any = pyfunctorch.temporarily_clear_interpreter_stack
    outside_dispatch: Any = _python_dispatch._disable_current_modes
    with outside_transforms(), outside_dispatch(), torch._C.DisableTorchFunction():
        return act()

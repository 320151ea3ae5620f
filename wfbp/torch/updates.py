"""The optimizer's update after gradients have been reduced.

Most optimizers take one ordinary ``step()`` with whole gradients. Only an optimizer that is known
to treat every element by itself (see :mod:`wfbp.torch.wrapping`) is stepped in parts: each rank
updates its shards of decoupled parameters, which are then gathered.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import optim
from torch.optim import optimizer as torch_optimizer

from wfbp.runtime.reducer import Reducer
from wfbp.runtime.step import BufferView
from wfbp.torch.original import own_attributes
from wfbp.torch.pending import PendingParameters
from wfbp.torch.state_sharding import SharedOutState, State, StateSharding

Reduced = Sequence[BufferView | None]


def bare_step(kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class, without the calls of hooks that PyTorch has put around it."""
    step: Any = kind.step
    # functools.wraps copies the mark to a program's decorators, which are no such wrapper.
    by_torch = getattr(step, "__globals__", {}).get("__name__") == torch_optimizer.__name__
    return step.__wrapped__ if by_torch and getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


_DEEPEST, _LONGEST = 2, 64
"""Of containers in an optimizer's attributes and groups that are looked at."""
_EARLY = 8
"""The first groups that hold this part of what is gathered are updated before the rest."""


class Update:
    """Steps an optimizer whose gradients a reducer has reduced.

    The training thread steps. A thread that reads a parameter waits, through ``pending``.
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
        self.sharding = sharding
        self._installed = 0
        self._settings: tuple[dict[str, Any], list[dict[str, Any]]] = {}, []
        """Attributes and groups of the optimizer in this step."""
        self._early: tuple[set[int], int] = set(), 0
        self._name = name
        self.pending = PendingParameters(params, reducer.gathers.await_tensor, name)

    def replicate(self) -> None:
        """Before the first update: every rank updates whole parameters, because ranks differ."""
        self.sharding = None

    def flush(self) -> None:
        """Wait until every parameter is up to date, and all that was gathered has arrived."""
        self.pending.wait_all()
        self._reducer.gathers.flush()

    def apply(self, reduced: Reduced | None) -> Any:
        """Step, and begin all-gathers; ``reduced`` is None if every ``p.grad`` is whole."""
        sharding = self.sharding
        assert sharding is not None
        if self._reducer.decoupled:
            self.pending.wait_all()
        if self._installed != self._reducer.num_installed:
            self._follow(sharding)
        sharding.begin_update()
        try:
            if not sharding.shards:
                # Checked here, too: when a plan takes parts depends on measured times.
                if self._has_hooks():  # which may change settings
                    return self._step_whole()
                return self._checked(self._optimizer, self._step_whole)
            sharding.check()
            return self._with_hooks(partial(self._step_shards, sharding, reduced))
        finally:
            sharding.publish()

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

    def state_for_use(self, state: State) -> Any:
        """The state as the program may use it: reading sharded state is an error."""
        if self.sharding is not None and self.sharding.shards:
            return SharedOutState(self.sharding, state)
        return state

    def before_another_state(self, state: State) -> None:
        """The optimizer is given other state."""
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
            self.sharding.let_go()

    def _has_hooks(self) -> bool:
        lists = [
            getattr(self._optimizer, f"_optimizer_step_{w}_hooks", ()) for w in ("pre", "post")
        ]
        lists += [getattr(torch_optimizer, f"_global_optimizer_{w}_hooks") for w in ("pre", "post")]
        return any(lists)

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

    def _run(self, targets: Mapping[int, torch.Tensor]) -> Any:
        """Step some tensors, by the id of the parameter that each stands for, by an optimizer of
        the same class with the settings of this step."""
        attributes, groups = self._settings
        kind = type(self._optimizer)
        stepped: Any = object.__new__(kind)
        stepped.__dict__.update(attributes)
        stepped.param_groups = []
        for group in groups:
            if params := [targets[id(p)] for p in group["params"] if id(p) in targets]:
                stepped.param_groups.append({**group, "params": params})
        return self._checked(stepped, partial(self._bare_step, stepped))

    def _checked(self, optimizer: Any, step: Callable[[], Any]) -> Any:
        """Step, and raise if the step of the user's class has changed more than parameters and
        state, which parts of a step would lose."""
        kind = type(self._optimizer)
        if kind.__module__.startswith("torch.optim."):
            return step()
        before = _settings_of(optimizer, self._params)
        result = step()
        after = _settings_of(optimizer, self._params)
        if changed := {name for name, _ in after ^ before}:
            raise RuntimeError(
                f"{self._name}: {kind.__name__}.step() has changed {', '.join(sorted(changed))}, "
                "which is lost: with optimizer_sharding=True, copies of the optimizer take the "
                "step in parts. Keep it in self.state[p], or pass optimizer_sharding=None"
            )
        return result

    def _step_shards(self, sharding: StateSharding, reduced: Reduced | None) -> Any:
        reducer, params = self._reducer, self._params
        start = reducer.clock.start_update()
        self._settings = own_attributes(self._optimizer), self._optimizer.param_groups
        addresses = [p.data_ptr() for p in params]
        indices = list(sharding.shards)
        early, count = self._early
        gathers = False
        try:
            targets = {}
            for index, param in enumerate(params):
                targets[id(param)] = self._target(sharding, index, reduced)
            gradients: Sequence[object] = reduced or [p.grad for p in params]
            torch.autograd.graph.increment_version(
                [params[k] for k in indices if gradients[k] is not None]
            )
            if early:
                self._run({k: targets.pop(k) for k in early if k in targets})
            reducer.gathers.send(addresses, params, count)
            gathers = True
            result = self._run(targets)
        finally:
            # Even if the optimizer raised: every rank must see what it did to its shards.
            if gathers:
                reducer.gathers.send_rest()
            else:
                reducer.gathers.send(addresses, params)
            self.pending.begin(indices, reducer.gathers.groups, addresses)
            for shard in sharding.shards.values():
                shard.grad = None
            sharding.publish()
        reducer.clock.mark_update(start)
        return result

    def _target(self, sharding: StateSharding, index: int, reduced: Reduced | None) -> torch.Tensor:
        """The tensor that the optimizer steps for a parameter: itself or its shard."""
        param, slot = self._params[index], None if reduced is None else reduced[index]
        grad = param.grad if reduced is None or slot is not None else None
        if index in sharding.shards:
            return sharding.shard(index, slot, grad)
        if slot is not None and grad is None and not param.numel():
            param.grad = torch.empty_like(param)  # as where another rank has it
        return param

    def _follow(self, sharding: StateSharding) -> None:
        """Shard what the installed plan decouples; collective."""
        reducer = self._reducer
        self._installed = reducer.num_installed
        # Empty parameters are stepped on every rank, because optimizers have state for them, too.
        some = [k for k, p in enumerate(self._params) if p.numel()]
        sharding.follow([k for k in some if k in reducer.gathers])
        # Forward's first parameters are updated first: their all-gathers hide the other updates.
        groups = reducer.gathers.groups
        sizes = [sum(self._params[k].nbytes for k in group) for group in groups]
        count = 0
        while sum(sizes[:count]) * _EARLY < sum(sizes) and count < len(sizes) - 1:
            count += 1
        self._early = {id(self._params[k]) for group in groups[:count] for k in group}, count


def _settings_of(
    optimizer: optim.Optimizer, params: Sequence[torch.Tensor]
) -> set[tuple[str, str]]:
    """Numbers and tensors among attributes and the values of groups, with marks that differ once a
    step has changed them. Flags, texts and other objects may change: nothing is computed of them
    step by step."""
    left_out = {id(p) for p in params}

    def mark(value: Any, depth: int = 0) -> str:
        if isinstance(value, bool) or id(value) in left_out or depth > _DEEPEST:
            return ""
        if isinstance(value, int | float | complex | np.generic):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return f"{id(value)} {0 if value.is_inference() else value._version}"
        if isinstance(value, np.ndarray):
            return str(zlib.crc32(value.tobytes()))
        if isinstance(value, dict):
            value = [*value.values()]
        if isinstance(value, list | tuple) and len(value) <= _LONGEST:
            return ",".join(mark(each, depth + 1) for each in value)
        return ""

    named = [(f"self.{k}", v) for k, v in vars(optimizer).items()]
    named = [(name, v) for name, v in named if name not in ("self.state", "self.param_groups")]
    for group in optimizer.param_groups:
        named += [(f"group[{k!r}]", v) for k, v in group.items() if k != "params"]
    return {(name, text) for name, value in named if (text := mark(value)).strip(",")}

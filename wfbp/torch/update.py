"""What follows when gradients have been reduced: the optimizer's update, whole or by shards."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from wfbp.runtime.engine import Engine
from wfbp.runtime.slot import Slot
from wfbp.torch import tensors
from wfbp.torch.sharding import Sharding, flat, ordered

Reduced = Sequence[Slot | None]
Step = Callable[[], Any]
Group = dict[str, Any]
Targets = list[torch.Tensor]

EARLY = 8
"""The first groups that hold this part of what is gathered are updated before the rest."""


class Update(ABC):
    """Steps an optimizer whose gradients an engine reduces. Used by the training thread.

    Args:
        engine: has reduced the gradients.
        optimizer: whose ``param_groups`` say what is stepped, and how.
        params: the engine's tensors, by index.
        step: the optimizer's own step.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        params: Sequence[torch.Tensor],
        step: Step,
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        self._params = params
        self._index = {id(p): k for k, p in enumerate(params)}
        self._step = step

    @abstractmethod
    def apply(self, reduced: Reduced | None) -> Any:
        """Step, and let what the plan decouples be gathered.

        Args:
            reduced: what the engine has reduced, shards among it; None where every ``p.grad``
                is whole.

        Returns:
            What the optimizer's step returned.
        """

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Do what must be done before anything else is reduced."""

    @abstractmethod
    def await_param(self, index: int) -> None:
        """Wait until a parameter is up to date."""

    def flush(self) -> None:
        """Wait until every parameter is up to date."""
        for index in range(len(self._params)):
            self.await_param(index)

    @property
    def pending(self) -> bool:
        """Whether any parameter may not be up to date."""
        return self._engine.gathering

    def _run(self, groups: Sequence[Group], targets: Callable[[torch.Tensor], Targets]) -> Any:
        """Step some tensors by the hyperparameters of these groups.

        What the optimizer changes in its groups (some count steps there) is kept. Groups without
        tensors it does not see.

        Args:
            groups: as they were when the step was asked for; left as they are.
            targets: what is stepped for a parameter.
        """
        parts = _apart(groups)
        for part in parts:
            part["params"] = [t for p in part["params"] for t in targets(p)]
        before = [dict(part) for part in parts]
        own = self._optimizer.param_groups
        self._optimizer.param_groups = [part for part in parts if part["params"]]
        try:
            result = self._step()
        finally:
            self._optimizer.param_groups = own
        for group, asked, old, new in zip(own, groups, before, parts, strict=True):
            for key, value in new.items():
                if value is not old[key]:
                    group[key] = value
                elif isinstance(value, torch.Tensor) and not torch.equal(value, asked[key]):
                    group[key].copy_(value)
        return result


def _apart(groups: Sequence[Group]) -> list[Group]:
    """Copies of groups that change neither with them nor they with these, as tensors would."""
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items()}
        for group in groups
    ]


class ShardedUpdate(Update):
    """Each rank updates its shards of what the plan decouples; the parameters are gathered.

    Args:
        sharding: of the optimizer's state.
    """

    def __init__(self, *args: Any, sharding: Sharding) -> None:
        super().__init__(*args)
        self.sharding = sharding
        self._installed = 0
        self._early: tuple[set[int], int] = set(), 0

    def apply(self, reduced: Reduced | None) -> Any:
        engine, sharding = self._engine, self.sharding
        self._follow()
        sharding.check()
        start = engine.now()
        if not sharding:
            result = self._step()
            engine.update = start, engine.now()
            return result
        groups = _apart(self._optimizer.param_groups)
        addresses = [p.data_ptr() for p in self._params]
        early, count = self._early
        begun = False
        try:
            if early:
                self._run(groups, lambda p: self._target(p, reduced) if id(p) in early else [])
            engine.gather(addresses, self._params, count)
            begun = True
            result = self._run(groups, lambda p: [] if id(p) in early else self._target(p, reduced))
        finally:
            # Whatever the optimizer raised: what it did to its shards, every rank must see.
            if begun:
                engine.gather_rest()
            else:
                engine.gather(addresses, self._params)
            sharding.drop_gradients()
        engine.update = start, engine.now()
        return result

    def await_param(self, index: int) -> None:
        self._engine.await_tensor(index)

    def join(self) -> None:
        """Have whole state on every rank, and whole updates until the next :meth:`apply`."""
        self.sharding.follow([])
        self._installed = 0

    def forget(self) -> None:
        """The optimizer's state is whole, because another one is being loaded."""
        self.sharding.forget()
        self._installed = 0

    def _follow(self) -> None:
        if self._installed != self._engine.num_installed:
            self._installed = self._engine.num_installed
            count = range(len(self._params))
            self.sharding.follow([k for k in count if self._engine.decouples_tensor(k)])
            self._early = self._first_groups()

    def _first_groups(self) -> tuple[set[int], int]:
        """The parameters that forward needs first, by their ids, and how many groups they fill.

        These are updated first, so that the others' update hides behind their all-gathers.
        """
        groups = self._engine.gather_groups
        sizes = [sum(self._params[k].nbytes for k in group) for group in groups]
        count = 0
        while sum(sizes[:count]) * EARLY < sum(sizes) and count < len(sizes) - 1:
            count += 1
        return {id(self._params[k]) for group in groups[:count] for k in group}, count

    def _target(self, param: torch.Tensor, reduced: Reduced | None) -> Targets:
        """What the optimizer steps for a parameter: itself or its shard.

        It sees empty shards, too, as tensors without gradient: it may count the steps of a group.
        """
        index = self._index.get(id(param), -1)
        if index not in self.sharding:
            return [param]
        shard = self.sharding.shard(index)
        slot = None if reduced is None else reduced[index]
        if not shard.numel():
            return [shard]
        if slot is not None and not slot.whole:
            shard.grad = tensors.shared(slot.data).view(param.dtype)
        elif param.grad is not None and (reduced is None or slot is not None):
            shard.grad = self.sharding.part(index, flat(ordered(param, param.grad)))
        return [shard]


class ReplicatedUpdate(Update):
    """Every rank updates every parameter; what the plan decouples just before it is read.

    Several threads may read: ``_lock`` has one wait until another has carried an update out. (What
    an update reads itself goes on.)
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = threading.RLock()
        self._updating = False
        self._layouts = [tensors.Layout.of(p) for p in self._params]
        self._gradients: dict[int, torch.Tensor] = {}
        self._group: dict[int, int] = {}
        self._groups: list[Group] = []

    def apply(self, reduced: Reduced | None) -> Any:
        self.flush()
        engine = self._engine
        if reduced is None or not engine.decoupled:
            return self._timed(self._step)
        # The program may go on with its own gradients where an earlier step left averages.
        grads = (p.grad for p in self._params)
        own = {g.data_ptr() for g in grads if g is not None and g.layout is torch.strided}
        whole = engine.gather_gradients(reduced, own)
        self._group = {k: n for n, group in enumerate(engine.gather_groups) for k in group}
        self._groups = _apart(self._optimizer.param_groups)
        now = []
        for index, slot in enumerate(whole):
            if not engine.decouples_tensor(index):
                now.append(index)
            elif slot is not None:
                self._gradients[index] = tensors.view(slot.data, self._layouts[index])
        return self._timed(lambda: self._update(now, {}))

    def await_param(self, index: int) -> None:
        with self._lock:
            if index not in self._gradients:
                return
            self._engine.await_tensor(index)
            # Not all that has arrived: were the optimizer to raise, ranks would lose different
            # updates.
            last = self._group[index]
            ready = [k for k in self._gradients if self._group[k] <= last]
            within, self._updating = self._updating, True
            try:
                self._update(ready, {k: self._gradients.pop(k) for k in ready})
            finally:
                self._updating = within

    @property
    def pending(self) -> bool:
        return bool(self._gradients) or self._updating or self._engine.gathering

    def settle(self) -> None:
        # A change of plans has gradients gathered anew, into the memory of those not yet used.
        self.flush()

    def flush(self) -> None:
        """Wait for all gradients, and update all parameters."""
        with self._lock:
            for index in list(self._gradients):
                self.await_param(index)
        self._engine.flush()

    def _timed(self, step: Step) -> Any:
        now = self._engine.now
        start = now()
        result = step()
        self._engine.update = start, now()
        return result

    def _update(self, indices: Iterable[int], gradients: dict[int, torch.Tensor]) -> Any:
        """Step some parameters as the groups were when the step was asked for."""
        chosen = {id(self._params[k]) for k in indices}
        held = {k: self._params[k].grad for k in gradients}
        for k, gradient in gradients.items():
            self._params[k].grad = gradient
        try:
            # Whoever reads a parameter may do so in a mode that step() was not called in.
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                torch.autocast(self._params[0].device.type, enabled=False),
            ):
                return self._run(self._groups, lambda p: [p] if id(p) in chosen else [])
        finally:
            for k, kept in held.items():
                self._params[k].grad = kept

"""Each rank updates its shards of what was reduced, and the parameters are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wfbp.torch import tensors
from wfbp.torch.state_sharding import StateSharding, flat, ordered
from wfbp.torch.update import Reduced, Targets, Update, copied_groups

_EARLY = 8
"""The first groups that hold this part of what is gathered are updated before the rest."""


class ShardedUpdate(Update):
    """Each rank updates its shards of what the plan decouples; the parameters are gathered.

    Args:
        sharding: of the optimizer's state.
    """

    def __init__(self, *args: Any, sharding: StateSharding) -> None:
        super().__init__(*args)
        self.sharding = sharding
        self._installed = 0
        self._early: tuple[set[int], int] = set(), 0

    def apply(self, reduced: Reduced | None) -> Any:
        try:
            return self._apply(reduced)
        finally:
            self.sharding.publish()

    def _apply(self, reduced: Reduced | None) -> Any:
        engine, sharding = self._engine, self.sharding
        self.settle()
        self._follow()
        sharding.check()
        start = engine.now()
        if not sharding:
            result = self._step()
            engine.update = start, engine.now()
            return result
        groups = copied_groups(self._optimizer.param_groups)
        addresses = [p.data_ptr() for p in self._params]
        early, count = self._early
        gathers = False
        with self.pending.updating():
            try:
                targets = {
                    id(p): self._target(p, reduced) for group in groups for p in group["params"]
                }
                # Another thread that reads a parameter waits from here on: its shard changes.
                self.pending.begin(
                    sharding.indices,
                    groups=engine.gather_groups,
                    changed=self._stepped(reduced),
                    addresses=addresses,
                    views=sharding.indices,
                    view_of=sharding.shard,
                )
                if early:
                    self._run(groups, lambda p: targets[id(p)] if id(p) in early else [])
                engine.gather(addresses, self._params, count)
                gathers = True
                result = self._run(groups, lambda p: [] if id(p) in early else targets[id(p)])
            finally:
                # Whatever the optimizer raised: what it did to its shards, every rank must see.
                if gathers:
                    engine.gather_rest()
                else:
                    engine.gather(addresses, self._params)
                sharding.drop_gradients()
        engine.update = start, engine.now()
        return result

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
            # What has no elements is stepped on every rank: optimizers have state for it, too.
            some = [k for k, p in enumerate(self._params) if p.numel()]
            self.sharding.follow([k for k in some if self._engine.decouples_tensor(k)])
            self._early = self._first_groups()

    def _first_groups(self) -> tuple[set[int], int]:
        """The parameters that forward needs first, by their ids, and how many groups they fill.

        These are updated first, so that the others' update hides behind their all-gathers.
        """
        groups = self._engine.gather_groups
        sizes = [sum(self._params[k].nbytes for k in group) for group in groups]
        count = 0
        while sum(sizes[:count]) * _EARLY < sum(sizes) and count < len(sizes) - 1:
            count += 1
        return {id(self._params[k]) for group in groups[:count] for k in group}, count

    def _stepped(self, reduced: Reduced | None) -> set[int]:
        """The sharded parameters that have changed on any rank."""
        found: Sequence[object] = [p.grad for p in self._params] if reduced is None else reduced
        return {k for k in self.sharding.indices if found[k] is not None}

    def _target(self, param: torch.Tensor, reduced: Reduced | None) -> Targets:
        """What the optimizer steps for a parameter: itself or its shard.

        It sees empty shards, too, as tensors without gradient: it may count the steps of a group.
        """
        index = self._index.get(id(param), -1)
        if index not in self.sharding:
            if not param.numel() and param.grad is None and reduced and reduced[index] is not None:
                param.grad = torch.empty_like(param)  # as where another rank has it
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

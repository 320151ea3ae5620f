"""What follows when gradients have been reduced: the optimizer's update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from wfbp.runtime.engine import Engine
from wfbp.runtime.slot import Slot
from wfbp.torch.travelling import Travelling

Reduced = Sequence[Slot | None]
Step = Callable[[], Any]
Group = dict[str, Any]
Targets = list[torch.Tensor]


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
        self._own_step = step
        self.stepping = False
        """Whether the optimizer is at work."""
        self._travelling = Travelling(params, [spec.name for spec in engine.specs])

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

    @property
    def at_once(self) -> Collection[int]:
        """Parameters whose update may not wait until they are read."""
        return ()

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

    def _step(self) -> Any:
        within, self.stepping = self.stepping, True
        try:
            return self._own_step()
        finally:
            self.stepping = within

    def _run(self, groups: Sequence[Group], targets: Callable[[torch.Tensor], Targets]) -> Any:
        """Step some tensors by the hyperparameters of these groups.

        What the optimizer changes in its groups (some count steps there) is kept. Groups without
        tensors it does not see.

        Args:
            groups: as they were when the step was asked for; left as they are.
            targets: what is stepped for a parameter.
        """
        parts = apart(groups)
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


def apart(groups: Sequence[Group]) -> list[Group]:
    """Copies of groups that change neither with them nor they with these, as tensors would."""
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items()}
        for group in groups
    ]

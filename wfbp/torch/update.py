"""What follows when gradients have been reduced: the optimizer's update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from wfbp.runtime.engine.engine import Engine
from wfbp.runtime.slot import BufferView
from wfbp.torch.pending_parameters import PendingParameters

Reduced = Sequence[BufferView | None]
Step = Callable[[], Any]
Group = dict[str, Any]
Targets = list[torch.Tensor]

STEPPED = "_wfbp_stepped"
"""Attribute of a distributed optimizer: a thread, and the groups that it steps."""


class Update(ABC):
    """Steps an optimizer whose gradients an engine reduces.

    The training thread steps. Whoever reads a parameter waits, through ``pending``, and carries
    out what is left to do.

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
        self.pending = PendingParameters(params, self)

    @abstractmethod
    def apply(self, reduced: Reduced | None) -> Any:
        """Step, and let what the plan decouples be gathered.

        Args:
            reduced: what the engine has reduced, shards among it; None where every ``p.grad``
                is whole.

        Returns:
            What the optimizer's step returned.
        """

    def settle(self) -> None:
        """Do what must be done before anything else is reduced."""
        self.pending.wait_all()

    def flush(self) -> None:
        """Wait until every parameter is up to date, and all that was gathered has arrived."""
        self.pending.wait_all()
        self._engine.flush()

    def await_arrival(self, index: int) -> None:
        """Wait for what is gathered for a parameter; any thread."""
        self._engine.await_tensor(index)

    def complete(self, indices: Collection[int]) -> None:  # noqa: B027 - most have nothing to do
        """Do what is left to do before these parameters are read."""

    def _step(self) -> Any:
        with self.pending.updating():
            return self._own_step()

    def _run(self, groups: Sequence[Group], targets: Callable[[torch.Tensor], Targets]) -> Any:
        """Step some tensors by the hyperparameters of these groups.

        What the optimizer changes in its groups (some count steps there) is kept. Groups without
        tensors it does not see.

        Args:
            groups: as they were when the step was asked for; left as they are.
            targets: what is stepped for a parameter.
        """
        parts = copied_groups(groups)
        for part in parts:
            part["params"] = [t for p in part["params"] for t in targets(p)]
        before = [dict(part) for part in parts]
        own = self._optimizer.param_groups
        with stepped_groups(self._optimizer, [part for part in parts if part["params"]]):
            result = self._own_step()
        for group, asked, old, new in zip(own, groups, before, parts, strict=True):
            for key, value in new.items():
                if key not in old or value is not old[key]:  # some count in a key of their own
                    group[key] = value
                elif isinstance(value, torch.Tensor) and not torch.equal(value, asked[key]):
                    group[key].copy_(value)
        return result


@contextmanager
def stepped_groups(optimizer: torch.optim.Optimizer, groups: list[Group]) -> Iterator[None]:
    """Within it an optimizer has these groups, as the calling thread sees it.

    Other threads may read and set its own meanwhile, as learning-rate schedulers do.
    """
    held = optimizer.__dict__
    within, held[STEPPED] = held.get(STEPPED), (get_ident(), groups)
    try:
        yield
    finally:
        held[STEPPED] = within


def copied_groups(groups: Sequence[Group]) -> list[Group]:
    """Copies of groups that change neither with them nor they with these, as tensors would."""
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items()}
        for group in groups
    ]

"""What callers may ask of an exchange; the same for gradients and for optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from wfbp.config import Config
from wfbp.core.types import Op, TensorSpec
from wfbp.jax.exchange import ExchangeKey
from wfbp.jax.trees import Layout
from wfbp.runtime.arguments import check_arguments
from wfbp.runtime.runtime import Runtime


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """How gradients are to be exchanged; None stands for what the environment says.

    Args:
        user: the function that was called, for messages.
        op: ``Average`` or ``Sum``.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: group size of ``threshold``.
        name: given by the caller, or None.
    """

    user: str
    op: Op
    schedule: str | None
    threshold_bytes: int | None
    name: str | None

    def check(self, config: Config) -> None:
        """Raise ``ValueError`` for an argument that is bad whatever the leaves are."""
        some = TensorSpec("any", (1,), "float32")
        check_arguments([some], *self._plan(config), self.op, 1, user=self.user)

    def request(self, runtime: Runtime, layout: Layout) -> ExchangeKey:
        """The exchange of a tree's leaves.

        Raises:
            ValueError: a bad argument.
        """
        schedule, limit_bytes = self._plan(runtime.config)
        check_arguments(layout.specs, schedule, limit_bytes, self.op, 1, user=self.user)
        return ExchangeKey(self.name or self.user, layout.specs, self.op, schedule, limit_bytes)

    def _plan(self, config: Config) -> tuple[str, int]:
        return (
            config.schedule if self.schedule is None else self.schedule,
            config.threshold_bytes if self.threshold_bytes is None else self.threshold_bytes,
        )

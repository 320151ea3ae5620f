"""What a simulation saw: when what computed and when what travelled."""

from __future__ import annotations

from dataclasses import dataclass

from wfbp.core.plan import Plan
from wfbp.core.types import Phase


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """Computation of one tensor's layer; seconds from the start of the simulation.

    Args:
        phase: forward or backward.
        tensor: index into the plan's tensors.
    """

    phase: Phase
    tensor: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """One group on the channel; seconds from the start of the simulation.

    Args:
        group: index into the plan's groups.
        ready_s: it might have left.
        start_s: it left.
        end_s: it has arrived everywhere.
        nbytes: bytes of its tensors.
    """

    group: int
    ready_s: float
    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """From the start of one forward to the start of the next.

    Args:
        compute: forward, then backward.
        messages: what left in this time, in order: first the all-gathers of the step before.
    """

    start_s: float
    end_s: float
    compute: tuple[ComputeSpan, ...]
    messages: tuple[MessageSpan, ...]

    @property
    def seconds(self) -> float:
        """Length of the iteration."""
        return self.end_s - self.start_s

    @property
    def backward_start_s(self) -> float:
        """When backward began."""
        return next(span.start_s for span in self.compute if span.phase is Phase.BACKWARD)


@dataclass(frozen=True, slots=True)
class Simulation:
    """Some iterations under one plan. The first has nothing to gather; the others are alike.

    Args:
        plan: what was replayed.
        iterations: at least two.
    """

    plan: Plan
    iterations: tuple[Iteration, ...]

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration in the steady state."""
        return self.iterations[-1].seconds

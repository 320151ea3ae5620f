"""Replays a plan on a trace with a virtual clock and the runtime's sequencer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.sequencer import Sequencer
from wfbp.core.timeline import check_same_tensors
from wfbp.core.trace import Trace
from wfbp.core.types import Phase


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """Computation of the layer of one of the plan's tensors; seconds since the simulation began."""

    phase: Phase
    tensor: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class MessageSpan:
    """One group on the channel; seconds from the start of the simulation.

    Args:
        group: index into the plan's groups.
        ready_s: it could be sent.
        start_s: it was sent.
        end_s: all ranks have it.
        nbytes: bytes of its tensors.
    """

    group: int
    ready_s: float
    start_s: float
    end_s: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """From one forward to the next; ``messages`` begin with the previous step's all-gathers."""

    start_s: float
    end_s: float
    compute: tuple[ComputeSpan, ...]
    messages: tuple[MessageSpan, ...]

    @property
    def seconds(self) -> float:
        """Length of the iteration."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Simulation:
    """Two or more iterations of one plan. The first has no all-gathers; the others are alike."""

    plan: Plan
    iterations: tuple[Iteration, ...]

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration in the steady state."""
        return self.iterations[-1].seconds


def simulate(
    plan: Plan, trace: Trace, costs: Costs, *, iterations: int = 4, channels: int = 1
) -> Simulation:
    """Simulate some iterations, event by event.

    One worker computes layer by layer, and the channel sends the groups that the sequencer
    releases. Compute runs 1 + kappa times slower while a message is under way. ``other_s`` follows
    backward, without messages.

    Args:
        plan, trace, costs: as of :func:`wfbp.core.timeline.timeline`.
        iterations: at least 2, because the first has no all-gathers.
        channels: messages that may be under way at once, each at its full speed.

    Raises:
        ValueError: plan and trace have different tensors, or a count is too small.

    Example:
        >>> from wfbp.core.cost import LinearCost
        >>> from wfbp.core.planners import plan
        >>> trace, costs = Trace.uniform("w", 250, 1.0, 2.0), Costs(LinearCost(0.5, 0.001))
        >>> simulate(plan("single", trace, costs), trace, costs).iteration_s
        4.5
    """
    if iterations < 2:
        raise ValueError(f"iterations: expected at least 2, found {iterations}")
    check_same_tensors(plan, trace)
    worker = _Worker(plan, trace, costs, channels)
    return Simulation(plan, tuple(worker.iterate() for _ in range(iterations)))


class _Worker:
    """The virtual clock, the computation, and the channel of one worker."""

    def __init__(self, plan: Plan, trace: Trace, costs: Costs, channels: int) -> None:
        self._plan = plan
        self._trace = trace
        self._sequencer = Sequencer(plan, channels)
        pairs = [(k, number) for number, group in enumerate(plan.groups) for k in group.tensors]
        self._group_of = {k: number for k, number in pairs if number < plan.num_backward}
        self._gather_of = {k: number for k, number in pairs if number >= plan.num_backward}
        self._to_arrive: set[int] = set()  # all-gathers of the iteration before
        sizes = [t.spec.nbytes for t in trace.tensors]
        self._nbytes = [sum(sizes[k] for k in group.tensors) for group in plan.groups]
        self._cost_s = [
            costs.of(group.operation)(nbytes)
            for group, nbytes in zip(plan.groups, self._nbytes, strict=True)
        ]
        self._slowdown = 1.0 + costs.kappa
        self._now_s = self._closed_s = 0.0
        self._exists_s = [0.0] * len(sizes)
        self._flights: list[tuple[float, int]] = []  # a heap: when which group arrives

    def iterate(self) -> Iteration:
        """Forward, backward, the rest of the step, and the time until the next."""
        sequencer, tensors = self._sequencer, self._trace.tensors
        self._begin_s = self._now_s
        self._compute: list[ComputeSpan] = []
        self._messages: list[MessageSpan] = []
        missing = [len(group.tensors) for group in self._plan.groups[: self._plan.num_backward]]
        for k, tensor in enumerate(tensors):
            self._wait(lambda k=k: self._gather_of.get(k) not in self._to_arrive)  # type: ignore[misc]
            self._run(Phase.FORWARD, k, tensor.forward_s)
        for k in reversed(range(len(tensors))):
            self._run(Phase.BACKWARD, k, tensors[k].backward_s)
            self._exists_s[k] = self._now_s
            missing[self._group_of[k]] -= 1
            while sequencer.num_ready < sequencer.num_early and not missing[sequencer.num_ready]:
                sequencer.ready(sequencer.num_ready)
        sequencer.close()
        self._closed_s = self._now_s
        self._wait(lambda: sequencer.reduced)
        self._now_s += self._trace.other_s
        sequencer.gather()
        self._to_arrive = set(self._gather_of.values())
        sequencer.next_step()
        return Iteration(self._begin_s, self._now_s, tuple(self._compute), tuple(self._messages))

    def _run(self, phase: Phase, tensor: int, seconds: float) -> None:
        """Compute for that long, plus the slow-down by communication."""
        start_s, left_s = self._now_s, seconds
        while True:
            self._land()
            self._leave()
            if not self._flights:
                self._now_s += left_s
                break
            end_s = self._now_s + left_s * self._slowdown
            next_s = self._flights[0][0]
            if end_s <= next_s:
                self._now_s = end_s
                break
            left_s -= (next_s - self._now_s) / self._slowdown
            self._now_s = next_s
        self._compute.append(ComputeSpan(phase, tensor, start_s, self._now_s))

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Compute nothing until something has arrived; nothing is sent at that moment yet."""
        self._land()
        while not condition():
            self._leave()
            self._now_s = self._flights[0][0]
            self._land()

    def _land(self) -> None:
        """Process the messages that have arrived by now."""
        while self._flights and self._flights[0][0] <= self._now_s:
            _, group = heappop(self._flights)
            self._sequencer.completed(group)
            self._to_arrive.discard(group)

    def _leave(self) -> None:
        """Start the messages that may be sent now."""
        while (group := self._sequencer.start_next()) is not None:
            start_s, end_s = self._now_s, self._now_s + self._cost_s[group]
            heappush(self._flights, (end_s, group))
            ready_s = self._begin_s
            if group < self._plan.num_backward:
                exist_s = max(self._exists_s[k] for k in self._plan.groups[group].tensors)
                ready_s = exist_s if self._plan.overlap else self._closed_s
            nbytes = self._nbytes[group]
            self._messages.append(MessageSpan(group, ready_s, start_s, end_s, nbytes))

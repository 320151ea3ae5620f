"""Replays a plan on a trace with a virtual clock and the runtime's sequencer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.sequencer import Sequencer
from wfbp.core.timeline import check_same_tensors
from wfbp.core.trace import Trace


class MessageSpan(NamedTuple):
    """One group on the channel; seconds from the start of the simulation."""

    group: int
    ready_s: float
    start_s: float
    end_s: float
    nbytes: int


class Iteration(NamedTuple):
    """From one forward to the next; ``messages`` begin with the previous step's all-gathers."""

    start_s: float
    backward_start_s: float
    backward_end_s: float
    end_s: float
    messages: tuple[MessageSpan, ...]


def simulate(plan: Plan, trace: Trace, costs: Costs, iterations: int = 4) -> list[Iteration]:
    """Simulate some iterations, event by event; the first has no all-gathers, the others are alike.

    One worker computes layer by layer, and the channel sends the groups that the sequencer
    releases. Compute runs 1 + kappa times slower while a message is under way. ``other_s`` follows
    backward, without messages.
    """
    check_same_tensors(plan, trace)
    worker = _Worker(plan, trace, costs)
    return [worker.iterate() for _ in range(iterations)]


class _Worker:
    """The virtual clock, the computation, and the channel of one worker."""

    def __init__(self, plan: Plan, trace: Trace, costs: Costs) -> None:
        self._plan = plan
        self._trace = trace
        self._sequencer = Sequencer(plan, 1)
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
        self._flight: tuple[float, int] | None = None  # when which group arrives

    def iterate(self) -> Iteration:
        """Forward, backward, the rest of the step, and the time until the next."""
        sequencer, tensors = self._sequencer, self._trace.tensors
        self._begin_s = self._now_s
        self._messages: list[MessageSpan] = []
        missing = [len(group.tensors) for group in self._plan.groups[: self._plan.num_backward]]
        for k, tensor in enumerate(tensors):
            self._wait(lambda k=k: self._gather_of.get(k) not in self._to_arrive)  # type: ignore[misc]
            self._run(tensor.forward_s)
        backward_start_s = self._now_s
        for k in reversed(range(len(tensors))):
            self._run(tensors[k].backward_s)
            self._exists_s[k] = self._now_s
            missing[self._group_of[k]] -= 1
            while sequencer.num_ready < self._plan.num_early and not missing[sequencer.num_ready]:
                sequencer.ready(sequencer.num_ready)
        sequencer.close()
        self._closed_s = self._now_s
        self._wait(lambda: sequencer.reduced)
        self._now_s += self._trace.other_s
        sequencer.gather()
        self._to_arrive = set(self._gather_of.values())
        sequencer.next_step()
        messages = tuple(self._messages)
        return Iteration(self._begin_s, backward_start_s, self._closed_s, self._now_s, messages)

    def _run(self, left_s: float) -> None:
        """Compute for that long, plus the slow-down by communication."""
        while True:
            self._land()
            self._leave()
            if self._flight is None:
                self._now_s += left_s
                return
            end_s = self._now_s + left_s * self._slowdown
            next_s = self._flight[0]
            if end_s <= next_s:
                self._now_s = end_s
                return
            left_s -= (next_s - self._now_s) / self._slowdown
            self._now_s = next_s

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Compute nothing until something has arrived; nothing is sent at that moment yet."""
        self._land()
        while not condition():
            self._leave()
            assert self._flight is not None
            self._now_s = self._flight[0]
            self._land()

    def _land(self) -> None:
        """Process the message that has arrived by now."""
        if self._flight is not None and self._flight[0] <= self._now_s:
            _, group = self._flight
            self._flight = None
            self._sequencer.completed(group)
            self._to_arrive.discard(group)

    def _leave(self) -> None:
        """Start the message that may be sent now."""
        group = self._sequencer.start_next()
        if group is not None:
            start_s, end_s = self._now_s, self._now_s + self._cost_s[group]
            self._flight = end_s, group
            ready_s = self._begin_s
            if group < self._plan.num_backward:
                exist_s = max(self._exists_s[k] for k in self._plan.groups[group].tensors)
                ready_s = exist_s if self._plan.overlap else self._closed_s
            nbytes = self._nbytes[group]
            self._messages.append(MessageSpan(group, ready_s, start_s, end_s, nbytes))

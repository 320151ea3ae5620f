"""The planned lane: sends one engine's groups, step after step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from wfbp.comm.backend import Backend, Work
from wfbp.comm.probe import WINDOW
from wfbp.core.plan import Plan
from wfbp.core.sequencer import Sequencer
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.calls import Reply
from wfbp.runtime.fusion import FusionBuffer

CLOSE = -1
DISCARD = -2


@dataclass(slots=True)
class Step:
    """What the training thread tells of one step, indexed by the plan's tensors.

    The training thread writes; the communication thread reads a tensor's entries only after its
    ready event, and everything after the close.
    """

    number: int
    addresses: list[int]
    owners: list[object]
    requested: bool = False
    discards: bool = False


@dataclass(frozen=True, slots=True)
class GroupTime:
    """When one group was packed and travelled, seconds of ``time.perf_counter``."""

    group: int
    start_s: float
    packed_s: float
    end_s: float


@dataclass(slots=True)
class StepResult:
    """What a step's messages brought.

    Args:
        present: per tensor of the plan, whether any rank had a gradient.
        requested: whether any rank asks for talk at the step border.
        discarded: whether any rank discards the step.
        times: when each group travelled.
    """

    present: list[bool]
    requested: bool = False
    discarded: bool = False
    times: list[GroupTime] = field(default_factory=list)


@dataclass(slots=True)
class _Flight:
    group: int
    work: Work[None]
    start_s: float
    packed_s: float
    since: float


class PlannedLane:
    """Feeds ready events to the sequencer and carries out what it says.

    ``events`` and ``reply`` are the border between threads: the training thread appends events
    (``deque.append`` is atomic) and installs plans only while no step is under way; everything
    else is the communication thread's. A step's events are the :class:`Step`, the tensors that
    become ready, and ``CLOSE`` (or ``DISCARD``: nothing has left). The next step's may follow at
    once: they are read when its messages have come in.
    """

    def __init__(self, backend: Backend, op: Op, name: str) -> None:
        self.backend = backend
        self.events: deque[int | Step] = deque()
        self.reply: Reply[StepResult] = Reply()
        self.cost: Callable[[float], float] | None = None
        self._op = op
        self._name = name
        self._error: WfbpError | None = None
        self._flights: deque[_Flight] = deque()
        self._step = Step(0, [], [])
        self._closing = False

    def install(self, plan: Plan) -> list[FusionBuffer]:
        """Send by another plan from the next step on; called between steps.

        Returns:
            The fusion buffers, one per group.
        """
        self._plan = plan
        self._sequencer = Sequencer(plan, WINDOW)
        # In one assignment: the communication thread may be asked where it is at any time.
        self._described = plan, self._sequencer
        self._buffers = [
            FusionBuffer(plan, group, self._op, self.backend.size)
            for group in range(len(plan.groups))
        ]
        self._result = StepResult([False] * len(plan.tensors))
        return self._buffers

    def wake(self) -> None:
        """Message that events are waiting; the turn that reads it advances the lane."""

    def advance(self) -> bool:
        progressed = False
        sequencer = self._sequencer
        events = self.events
        while events and not self._closing:
            event = events.popleft()
            if isinstance(event, Step):
                self._step = event
            elif event >= 0:
                sequencer.ready(event)
            elif event == CLOSE:
                sequencer.close()
                self._closing = True
            else:
                sequencer.reset()
        while (group := sequencer.start_next()) is not None:
            self._start(group)
            progressed = True
        while self._flights and self._flights[0].work.test():
            self._complete(self._flights.popleft())
            progressed = True
            if (group := sequencer.start_next()) is not None:
                self._start(group)
        for flight in list(self._flights)[1:]:
            flight.work.test()
        if sequencer.done:
            sequencer.reset()
            self._closing = False
            result, self._result = self._result, StepResult([False] * len(self._plan.tensors))
            self.reply.put(result)
            progressed = True
        return progressed

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    @property
    def has_events(self) -> bool:
        return bool(self.events) and not self._closing

    @property
    def has_room(self) -> bool:
        return len(self._flights) < WINDOW

    @property
    def expected_s(self) -> float | None:
        if not self._flights or self.cost is None:
            return None
        return self.cost(self._flights[0].work.nbytes)

    @property
    def waiting_since(self) -> float | None:
        return self._flights[0].since if self._flights else None

    def describe(self) -> str:
        place = f"{self._name}, step {self._step.number}"
        plan, sequencer = self._described
        count = len(plan.groups)
        if self._flights:
            group = self._flights[0].group
            return f"{place}: group {group + 1} of {count} ({_members(plan, group)}) is under way"
        next_group = sequencer.num_started
        missing = sequencer.missing()
        if next_group == count or not any(
            left < len(g.tensors) for left, g in zip(missing, plan.groups, strict=True)
        ):
            return f"{place}: nothing posted yet"
        return (
            f"{place}: waiting for {missing[next_group]} gradients of group {next_group + 1} "
            f"of {count} ({_members(plan, next_group)})"
        )

    def fail(self, error: WfbpError) -> None:
        self._flights.clear()
        self.reply.fail(error)

    def _start(self, group: int) -> None:
        start_s = time.perf_counter()
        fusion = self._buffers[group]
        step = self._step
        fusion.pack(step.addresses, step.requested, step.number, step.discards)
        packed_s = time.perf_counter()
        work = self.backend.all_reduce(fusion.buffer, fusion.dtype, self._op)
        self._flights.append(_Flight(group, work, start_s, packed_s, time.monotonic()))

    def _complete(self, flight: _Flight) -> None:
        arrival = self._buffers[flight.group].arrived(self._step.number)
        if not arrival.steps_agree:
            raise DisagreementError(
                f"rank {self.backend.rank}: {self._name}: ranks are at different steps (here "
                f"{self._step.number}); every rank must call step(), synchronize() and zero_grad() "
                "equally often"
            )
        for k, here in zip(self._plan.groups[flight.group].tensors, arrival.present, strict=True):
            self._result.present[k] = here
        self._result.requested |= arrival.requested
        self._result.discarded |= arrival.discarded
        self._result.times.append(
            GroupTime(flight.group, flight.start_s, flight.packed_s, time.perf_counter())
        )
        self._sequencer.completed(flight.group)


def _members(plan: Plan, group: int) -> str:
    """Names of a group's tensors, shortened."""
    names = [plan.tensors[k].name for k in plan.groups[group].tensors]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

"""The plan executor: sends one engine's groups, step after step."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from wfbp.comm.backend import Backend, Work
from wfbp.comm.probe import WINDOW
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.sequencer import Sequencer
from wfbp.core.types import Op, Operation
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.progress.loop import Reply
from wfbp.runtime.step import (
    CLOSE,
    NO_GATHER,
    GatherRequest,
    GroupTime,
    Step,
    StepResult,
    Timestamp,
)
from wfbp.runtime.transport.transport import BackwardBuffer, Transport


@dataclass(slots=True)
class _InFlight:
    group: int
    work: Work[None]
    start: Timestamp
    packed: Timestamp
    since: float
    expected_s: float | None


class PlanExecutor:
    """Feeds ready events to the sequencer and carries out its decisions.

    The training thread appends to ``events`` (``deque.append`` is atomic), reads ``reply`` and
    ``arrivals``, and installs plans only while nothing is under way; everything else happens under
    the progress lock. A step's events are the :class:`Step`, the indices of tensors that become
    ready, and ``CLOSE`` (or ``DISCARD``: nothing has left). The next step's may follow at once:
    they are read when this step's messages have come in. A :class:`GatherRequest` lets the plan's
    all-gathers go, which may last into the next step; it comes before any tensor of that step is
    ready.
    """

    def __init__(self, backend: Backend, transport: Transport, op: Op, name: str) -> None:
        self.backend = backend
        self._transport = transport
        self.events: deque[int | Step | GatherRequest] = deque()
        self.reply: Reply[StepResult] = Reply()
        self.arrivals: Reply[GroupTime] = Reply()
        self.costs: Costs | None = None
        self._op = op
        self._name = name
        self._in_flight: deque[_InFlight] = deque()
        self._step = Step(0, [], [])
        self._gather = NO_GATHER
        self._closing = False
        self._num_started = 0

    def install(self, plan: Plan) -> list[BackwardBuffer]:
        """Send by another plan from the next step on, while nothing is under way; returns the
        buffers of backward's groups."""
        self._plan = plan
        self._sequencer = Sequencer(plan, WINDOW)
        # In one assignment: the communication thread may be asked where it is at any time.
        self._described = plan, self._sequencer
        self._buffers = self._transport.backward(plan, self._op)
        self._gather_buffers = self._transport.forward(plan)
        self._gather = NO_GATHER  # else it would keep memory that no plan uses any more
        self._result = StepResult([False] * len(plan.tensors))
        return self._buffers

    def release(self) -> None:
        """Let the buffers go; the loop has stopped."""
        self._buffers.clear()
        self._gather_buffers.clear()

    def wake(self) -> None:
        """An empty message: the loop advances every lane after it has read one."""

    def advance(self) -> bool:
        self._transport.poll()
        progressed = self._start_groups()
        is_enqueued = self._transport.is_enqueued
        while self._in_flight and is_enqueued(self._in_flight[0].work):
            flight = self._in_flight.popleft()
            progressed = True
            self._sequencer.completed(flight.group)
            if self._transport.copies_in_order:
                self._complete(flight)
                self._start_groups()
            else:  # a link should not wait for the copy
                arrived = self._transport.lane_stamp()
                self._start_groups()
                self._complete(flight, arrived)
        for flight in list(self._in_flight)[1:]:
            is_enqueued(flight.work)
        if self._closing and self._sequencer.reduced:
            self._closing = False
            result, self._result = self._result, StepResult([False] * len(self._plan.tensors))
            self.reply.put(result)
            progressed = True
        return progressed

    def _start_groups(self) -> bool:
        """Read events, and start what may go; True where anything was started."""
        events, sequencer = self.events, self._sequencer
        while events and not self._closing:
            self._read(events.popleft())
        progressed = False
        while (group := sequencer.start_next()) is not None:
            self._start(group)
            progressed = True
        return progressed

    def _read(self, event: int | Step | GatherRequest) -> None:
        sequencer = self._sequencer
        if isinstance(event, GatherRequest):
            self._gather = event
            sequencer.gather(event.count)
            return
        if sequencer.reduced:  # this begins the next step, or sends a step again
            sequencer.next_step()
        if isinstance(event, Step):
            self._step = event
        elif event >= 0:
            sequencer.ready(event)
        elif event == CLOSE:
            sequencer.close()
            self._closing = True
            for arrived in self._result.times:
                self._deliver(arrived.group)
        else:
            sequencer.discard()

    def may_progress(self) -> bool:
        return self._transport.may_progress()

    def rest(self, nap_s: float, most_s: float) -> bool:
        return self._transport.rest(nap_s, most_s)

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    @property
    def has_events(self) -> bool:
        return bool(self.events) and not self._closing

    @property
    def has_room(self) -> bool:
        return len(self._in_flight) < WINDOW

    @property
    def owes_work(self) -> bool:
        events = list(self.events)
        return self._sequencer.gathering or any(
            isinstance(event, GatherRequest) for event in events
        )

    @property
    def counts(self) -> tuple[int, int]:
        return self._num_started, self._num_started - len(self._in_flight)

    @property
    def expected_s(self) -> float | None:
        return self._in_flight[0].expected_s if self._in_flight else None

    @property
    def waiting_since(self) -> float | None:
        return self._in_flight[0].since if self._in_flight else self._transport.waiting_since

    def describe(self) -> str:
        place = f"{self._name}, step {self._step.number}"
        plan, sequencer = self._described
        if self._in_flight:
            group = self._in_flight[0].group
            what = plan.groups[group].operation.value.replace("_", "-")
            return (
                f"{place}: {what} of group {group + 1} of {len(plan.groups)} "
                f"({_tensor_names(plan, group)}) is under way"
            )
        next_group = sequencer.num_started
        missing = sequencer.missing()
        if next_group == len(missing) or not any(
            left < len(g.tensors) for left, g in zip(missing, plan.groups, strict=False)
        ):
            return f"{place}: nothing posted yet"
        count = missing[next_group]
        waits = f"waiting for {count} gradients" if count else "before its end, with all gradients"
        return (
            f"{place}: {waits} of group {next_group + 1} of {len(missing)} "
            f"({_tensor_names(plan, next_group)})"
        )

    def fail(self, error: WfbpError) -> None:
        self._in_flight.clear()
        self._transport.give_up()
        self.reply.fail(error)
        self.arrivals.fail(error)

    def _start(self, group: int) -> None:
        transport = self._transport
        if group < len(self._buffers):
            transport.order_after_gradients(self._step, group)
            start = transport.packing_stamp()
            buffer = self._buffers[group]
            buffer.pack(self._step)
            packed = transport.packing_stamp()
            work = buffer.send(transport.backend)
        else:
            transport.order_after_shards(self._gather)
            start = transport.packing_stamp()
            gathered = self._gather_buffers[group - len(self._buffers)]
            gathered.pack(self._gather)
            packed = transport.packing_stamp()
            work = gathered.send(transport.backend)
        expected_s = None
        if self.costs is not None:
            expected_s = self.costs.of(self._plan.groups[group].operation)(work.nbytes)
        since = time.monotonic()
        self._in_flight.append(_InFlight(group, work, start, packed, since, expected_s))
        self._num_started += 1

    def _complete(self, flight: _InFlight, arrived: Timestamp | None = None) -> None:
        """Copy what it brought; ``arrived`` is the moment before that, where it counts."""
        group = flight.group
        if group < len(self._buffers):
            self._take_in(group)
            self._result.times.append(self._time(flight, arrived))
            if self._closing:
                self._deliver(group)
        else:
            self._gather_buffers[group - len(self._buffers)].unpack(self._gather.addresses)
            self.arrivals.put(self._time(flight, arrived))

    def _deliver(self, group: int) -> None:
        """Copy what a group of backward brought to where it is wanted."""
        whole = self._plan.groups[group].operation is Operation.ALL_REDUCE
        if self._step.targets and whole:
            self._buffers[group].unpack(self._step.targets)

    def _time(self, flight: _InFlight, arrived: Timestamp | None) -> GroupTime:
        end = self._transport.lane_stamp() if arrived is None else arrived
        times = GroupTime(flight.group, flight.start, flight.packed, end)
        self._transport.watch(times)
        return times

    def _take_in(self, group: int) -> None:
        """What a group of backward brought."""
        arrival = self._buffers[group].arrived(self._step.number)
        if not arrival.steps_agree:
            raise DisagreementError(
                f"rank {self.backend.rank}: {self._name}: ranks are at different steps (here "
                f"{self._step.number}); every rank must call step(), synchronize() and zero_grad() "
                "equally often"
            )
        for k, here in zip(arrival.tensors, arrival.present, strict=True):
            self._result.present[k] = here
        self._result.requested |= arrival.requested
        self._result.discarded |= arrival.discarded


def _tensor_names(plan: Plan, group: int) -> str:
    """Names of a group's tensors, shortened."""
    names = [plan.tensors[k].name for k in plan.groups[group].tensors]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

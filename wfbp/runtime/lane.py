"""The communication side of one optimizer: sends its groups, step after step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from wfbp.comm.backend import Backend, Work
from wfbp.comm.cost_probe import WINDOW
from wfbp.comm.memory import Dependencies, Memory, Stamp
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan, split_by_dtype
from wfbp.core.ranks import counted
from wfbp.core.sequencer import Sequencer
from wfbp.core.types import CODECS, TensorSpec
from wfbp.errors import DisagreementError, WfbpError
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.buffers import GroupBuffer
from wfbp.runtime.coded_buffer import ErrorFeedback, MixedBuffer, make_buffer
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.progress.loop import Expected, Reply, needs_of
from wfbp.runtime.progress.stall import Members, Need
from wfbp.runtime.step import (
    BufferView,
    Event,
    Gather,
    GradientRef,
    GroupReady,
    GroupStamps,
    Step,
    StepResult,
    Used,
)


@dataclass(slots=True)
class _InFlight:
    group: int
    work: Work[None]
    start: Stamp
    packed: Stamp
    since: float  # ``time.monotonic``


class Lane:
    """Acts on the reducer's events as the sequencer decides, under the progress lock.

    The training thread appends to ``events``, reads ``reply`` and ``arrivals``, and installs plans
    only while nothing is under way. The next step's events may follow a :class:`Close` at once. A
    :class:`Gather` must precede all events of the next step.
    """

    def __init__(
        self, backend: Backend, memory: Memory, options: ReducerOptions, specs: Sequence[TensorSpec]
    ) -> None:
        self.backend = backend
        self.errors = ErrorFeedback(specs, backend.rank, backend.size)
        # The training thread appends and the lane takes: a deque's operations are atomic.
        self.events: deque[Event] = deque()
        self.reply: Reply[StepResult] = Reply()
        self.arrivals: Reply[GroupStamps] = Reply()
        self.polls = memory.polls
        self.open_step = Step(0, [], [], [])  # the current step of training, for describe()
        self._memory = memory
        self.options = options
        self._name = options.name
        self._in_flight: deque[_InFlight] = deque()
        self._step = self.open_step
        self._gather: Gather | None = None
        self._stamps: list[GroupStamps] = []
        self._dependencies: dict[int, Dependencies] = {}
        self._closing = False
        self._wires: dict[str, str] = {}
        self._reduced: list[int] = []  # tensors that the last step has reduced

    def install(
        self, plan: Plan, members: Sequence[int], costs: Costs | None = None
    ) -> list[GroupBuffer | MixedBuffer]:
        """Use another plan from the next step on; returns a buffer per group."""
        self._memory.settle()
        self._gather = None  # else it would keep memory that no plan uses any more
        backward = plan.groups[: plan.num_backward]
        wires = {plan.tensors[k].name: group.wire for group in backward for k in group.tensors}
        # Else errors of encoding would wait for the return of such a plan.
        if any(self._wires.get(name, wire) != wire for name, wire in wires.items()):
            self.errors.forget()
        self._wires |= wires
        self.buffers = self._make_buffers(plan, members, encodes=True)
        step_bytes = self.backend.step_bytes
        self._expected = [Expected()] * len(plan.groups)
        for k, (group, buffer) in enumerate(zip(plan.groups, self.buffers, strict=True)):
            if costs is None:
                break
            cost, step_s = costs.of(group.operation), None
            if step_bytes is not None:
                # Of a large message, also where this one is small: its network is as slow.
                num_steps = max(1.0, buffer.nbytes / step_bytes)
                step_s = cost(num_steps * step_bytes) / num_steps
            self._expected[k] = Expected(cost(buffer.nbytes), step_s)
        self._members, self._num_backward = members, plan.num_backward
        self._sequencer = Sequencer(plan, WINDOW)
        # In one assignment: the communication thread may be asked where it is at any time.
        self._described = plan, self._sequencer
        return self.buffers

    def _make_buffers(
        self, plan: Plan, members: Sequence[int], encodes: bool
    ) -> list[GroupBuffer | MixedBuffer]:
        options, backend, buffers = self.options, self.backend, []
        for number, group in enumerate(plan.groups):
            wires = [""] * len(group.tensors)
            if number < plan.num_backward:
                specs = [plan.tensors[k] for k in group.tensors]
                wires = [options.wire_of(spec, backend.size, group.wire) for spec in specs]
            if not encodes:
                wires = ["" if wire in CODECS else wire for wire in wires]
            buffers.append(
                make_buffer(plan, number, members, options.op, self._memory, wires, self.errors)
            )
        return buffers

    def reduce_now(
        self, channel: ControlChannel, specs: Sequence[TensorSpec], gradients: Sequence[GradientRef]
    ) -> list[BufferView | None]:
        """Reduce gradients outside of the plan, in new storage, between two steps; None where no
        rank has one. None is encoded. Collective; on the training thread."""
        memory = self._memory
        step = Step(0, [address for address, _ in gradients], [owner for _, owner in gradients], [])
        _, dependencies = memory.close()
        plan = Plan("unplanned", tuple(specs), split_by_dtype(specs, [range(len(specs))]))
        memory.settle()
        buffers = self._make_buffers(plan, range(len(specs)), encodes=False)
        for buffer in buffers:

            def send(_: Backend, buffer: GroupBuffer | MixedBuffer = buffer) -> Work[None]:
                memory.begin_packing(dependencies)
                buffer.pack(step)
                memory.end_packing()
                return buffer.send()

            channel.call(send, "gradients outside of the plan")
            buffer.arrived()
        memory.join()
        present = buffers[-1].read_flags(step).present
        views: list[BufferView | None] = [None] * len(specs)
        for buffer, group in zip(buffers, plan.groups, strict=True):
            for position, k in enumerate(group.tensors):
                if present[k]:
                    views[k] = buffer.view(position)
        return views

    # Under the progress lock.

    def advance(self) -> bool:
        memory, in_flight = self._memory, self._in_flight
        memory.poll()
        # Else nothing new may start: what may has been started with the last event, or end.
        progressed = bool(self.events) and self._start_groups()
        # The oldest alone: a test makes progress for everything under way on the backend.
        while in_flight and memory.is_enqueued(in_flight[0].work):
            flight = in_flight.popleft()
            progressed = True
            self._sequencer.completed(flight.group)
            if memory.copies_in_order:
                self._complete(flight)
                self._start_groups()
            else:  # a link should not wait for the copy
                end = memory.end_group()
                self._start_groups()
                self._complete(flight, end)
        if self._closing and self._sequencer.reduced:
            self._closing = False
            progressed = True
            self._conclude()
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

    def _read(self, event: Event) -> None:
        sequencer = self._sequencer
        if isinstance(event, Used):
            self.errors.scale(self._reduced if event.scale else None, event.scale)
            return
        if isinstance(event, Gather):
            self._gather = event
            self._dependencies[sequencer.next_gather] = event.dependencies
            sequencer.gather(event.count)
            return
        if sequencer.reduced:  # this begins the next step, or sends a step again
            sequencer.next_step()
        self._step = event.step
        if isinstance(event, GroupReady):
            self._dependencies[event.group] = event.dependencies
            sequencer.ready(event.group)
            return
        # Groups posted before depend on their own gradients only. The host runs ahead of a device,
        # where backward may still be computing.
        self._dependencies[sequencer.num_ready] = event.dependencies
        sequencer.close()
        self._closing = True
        if event.step.targets:
            for arrived in self._stamps:
                self.buffers[arrived.group].deliver(event.step)

    def _start(self, group: int) -> None:
        memory, buffer = self._memory, self.buffers[group]
        first = group in (0, self._num_backward)
        start = memory.begin_packing(self._dependencies.pop(group, ()), behind_messages=first)
        if group < self._num_backward:
            buffer.pack(self._step)
        else:
            assert self._gather is not None
            buffer.pack(self._gather)
        packed = memory.end_packing()
        work = buffer.send()
        self._in_flight.append(_InFlight(group, work, start, packed, time.monotonic()))

    def _complete(self, flight: _InFlight, end: Stamp | None = None) -> None:
        """Copy the results; ``end`` is the time before that, if it counts."""
        group, buffer = flight.group, self.buffers[flight.group]
        backward = group < self._num_backward
        if backward:
            buffer.arrived()
        else:
            assert self._gather is not None
            buffer.deliver(self._gather)
        end = self._memory.end_group() if end is None else end
        stamps = GroupStamps(group, flight.start, flight.packed, end)
        if not backward:
            self.arrivals.put(stamps)
            return
        self._stamps.append(stamps)
        if self._closing and self._step.targets:
            buffer.deliver(self._step)

    def _conclude(self) -> None:
        """All groups of backward have arrived: reply to the training thread."""
        step = self._step
        result = self.buffers[self._num_backward - 1].read_flags(step)
        if not result.steps_agree:
            raise DisagreementError(
                f"rank {self.backend.rank}: {self._name}: ranks are at different steps (here "
                f"{step.number}), or ended this one by different methods of the optimizer; every "
                "rank must call step(), synchronize(), zero_grad() and the optimizer's own methods "
                "equally often, in the same order"
            )
        result.stamps, self._stamps = self._stamps, []
        each = zip(self._members, result.present, strict=True)
        self._reduced = [k for k, present in each if present]
        if result.discarded:
            self.errors.scale(self._reduced, 0)
        self.reply.put(result)

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    @property
    def has_events(self) -> bool:
        return bool(self.events) and not self._closing

    @property
    def has_room(self) -> bool:
        return len(self._in_flight) < WINDOW

    is_idle = False

    @property
    def owes_work(self) -> bool:
        # In this order: shutdown() asks from its thread while the lane may take an event.
        return Gather in map(type, list(self.events)) or self._sequencer.gathering

    @property
    def expected(self) -> Expected:
        return self._expected[self._in_flight[0].group]

    @property
    def waiting_since(self) -> float | None:
        if not self._in_flight:
            return self._memory.waiting_since
        return max(self._in_flight[0].since, self._in_flight[0].work.moved_s)

    def begun(self) -> dict[str, int]:
        return {}

    def needs(self, members: Members) -> list[Need] | None:
        found = [needs_of(flight.work, members) for flight in self._in_flight]
        if self._memory.waiting_since is not None or None in found:
            return None
        return [need for needs in found for need in needs or ()]

    def describe(self) -> str:
        plan, sequencer = self._described
        if self._in_flight:
            group = self._in_flight[0].group
            what = plan.groups[group].operation.value.replace("_", "-")
            return (
                f"{self._name}, step {self._step.number}: {what} of group {group + 1} of "
                f"{len(plan.groups)} ({_tensor_names(plan, group)}) is under way"
            )
        step = self.open_step
        place = f"{self._name}, step {step.number}"
        # Not those started in an earlier step, while training has not announced any of this one.
        first = sequencer.num_started if step is self._step and not sequencer.reduced else 0
        missing = step.missing[: plan.num_backward]
        sizes = [len(group.tensors) for group in plan.groups[: plan.num_backward]]
        if first == len(sizes) or missing == sizes or len(missing) != len(sizes):
            return f"{place}: nothing posted yet"
        count = missing[first]
        waits = "before its end, with all gradients"
        if count:
            waits = f"waiting for {counted(count, 'gradient')}"
        return (
            f"{place}: {waits} of group {first + 1} of {len(sizes)} ({_tensor_names(plan, first)})"
        )

    def fail(self, error: WfbpError) -> None:
        self._in_flight.clear()
        self._memory.give_up()
        self.reply.fail(error)
        self.arrivals.fail(error)


def _tensor_names(plan: Plan, group: int) -> str:
    """Names of a group's tensors, shortened."""
    names = [plan.tensors[k].name for k in plan.groups[group].tensors]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

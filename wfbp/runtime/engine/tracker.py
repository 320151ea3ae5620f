"""Tracks the gradients of the open step, on the training thread, as they appear.

Counts how often each appears (accumulation is learned), checks that none lies where another one is
averaged, and posts the events that let groups leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from wfbp.core.plan import Plan
from wfbp.core.types import Operation, TensorSpec
from wfbp.errors import WfbpError
from wfbp.runtime.progress.plan_executor import PlanExecutor
from wfbp.runtime.progress.thread import CommunicationThread
from wfbp.runtime.step import (
    EMPTY_VIEW,
    BufferView,
    GradientRef,
    GroupTime,
    Span,
    Step,
    StepResult,
    StepTimestamps,
    Timestamp,
)
from wfbp.runtime.transport.transport import BackwardBuffer, Transport

_PATIENCE_STEPS = 8
"""So many steps in a row in which some gradient appears less often than expected are waited for."""


class AccumulationCounter:
    """Counts per tensor how often its gradient appears in a step. For the training thread.

    The hot path reads ``fired`` and ``expected`` and increments ``fired`` without a call.
    """

    def __init__(self, passes: int, num_tensors: int) -> None:
        self.expected = [passes] * num_tensors
        """After so many a tensor is ready."""
        self.begin()
        self._rarer_steps = 0

    def begin(self) -> None:
        """A step begins."""
        self.fired = [0] * len(self.expected)
        """How often each gradient has appeared in the open step."""

    def learn(self) -> None:
        """Expect as many gradients as this step had: more at once, fewer after some such steps.

        Example:
            >>> counter = AccumulationCounter(1, 2)
            >>> counter.fired = [3, 0]
            >>> counter.learn()
            >>> counter.expected
            [3, 1]
        """
        rarer = False
        for index, fired in enumerate(self.fired):
            if fired > self.expected[index]:
                self.expected[index] = fired
            elif 0 < fired < self.expected[index]:
                rarer = True
        self._rarer_steps = self._rarer_steps + 1 if rarer else 0
        if self._rarer_steps >= _PATIENCE_STEPS:
            self._rarer_steps = 0
            self.expected = [max(1, fired) for fired in self.fired]


class AliasCheck:
    """The slots of a plan, each for one tensor's gradients alone.

    A program that lets two tensors share one gradient may put one into the other's slot, and the
    average may have been written there before it is packed.

    Args:
        specs: all tensors of the engine.
        members: per tensor of the plan, its index into the specs.
        slots: per tensor of the plan, where its gradient is averaged.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], members: Sequence[int], slots: Sequence[BufferView]
    ) -> None:
        self._specs = specs
        self._members = members
        # (Of a tensor without elements the address may be another one's.)
        self._owners = {
            slot.address: index
            for index, slot in zip(members, slots, strict=True)
            if slot.whole and specs[index].numel
        }

    def add(self, index: int, slot: BufferView) -> None:
        """A tensor's gradient is averaged here, too."""
        if slot.whole and self._specs[index].numel:
            self._owners[slot.address] = index

    def check(
        self, who: str, addresses: Sequence[int], unplanned: Mapping[int, GradientRef]
    ) -> None:
        """Raise ``RuntimeError`` if a gradient lies in another tensor's slot.

        ``addresses`` are those of the plan's tensors; ``unplanned`` are the other gradients, by
        index.
        """
        if not self._owners.keys().isdisjoint(addresses):
            for index, address in zip(self._members, addresses, strict=True):
                self._check(who, index, address)
        for index, (address, _) in unplanned.items():
            self._check(who, index, address)

    def _check(self, who: str, index: int, address: int) -> None:
        owner = self._owners.get(address, index)
        if owner != index and self._specs[index].numel:
            raise RuntimeError(
                f"{who}: the gradient of {self._specs[index].name} lies in memory in which that of "
                f"{self._specs[owner].name} is averaged; give each tensor a gradient of its own, "
                "for example by clone()"
            )


class GradientTracker:
    """What is known of the open step: which gradients exist, where, and since when.

    Tensors are known by their *index* into the specs, and to the lane by their *plan index*, that
    into the plan's tensors; it is -1 for a tensor that the plan does not carry, whose gradient is
    *unplanned*. ``fetch`` returns the gradient of a tensor for which no event came, or None.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        lane: PlanExecutor,
        transport: Transport,
        thread: CommunicationThread,
        passes: int,
        fetch: Callable[[int], GradientRef | None],
        who: str,
    ) -> None:
        self.specs = specs
        self._index = {spec: k for k, spec in enumerate(specs)}
        self._events = lane.events
        self._transport = transport
        self._produced = transport.produced
        self._group_complete = transport.complete
        self._thread = thread
        self._post = thread.post
        self._wake = lane.wake
        self._fetch = fetch
        self._who = who
        self._accumulation = AccumulationCounter(passes, len(specs))

    def install(self, plan: Plan, buffers: Sequence[BackwardBuffer]) -> None:
        """Gather for another plan from the next :meth:`begin` on."""
        groups = plan.groups[: plan.num_backward]
        self.members: Sequence[int] = [self._index[spec] for spec in plan.tensors]  # by plan index
        self.plan_indices = [-1] * len(self.specs)
        self._group_of = [0] * len(plan.tensors)
        self._slots = [EMPTY_VIEW] * len(plan.tensors)
        for plan_index, index in enumerate(self.members):
            self.plan_indices[index] = plan_index
        for group, members in enumerate(groups):
            whole = members.operation is Operation.ALL_REDUCE
            for position, plan_index in enumerate(members.tensors):
                self._group_of[plan_index] = group
                self._slots[plan_index] = self._transport.view(buffers[group].slot(position), whole)
        self._buffers = buffers
        self._num_moves = [buffer.num_moves for buffer in buffers]
        self._groups = [members.tensors for members in groups]
        self._alias_check = AliasCheck(self.specs, self.members, self._slots)
        self._dormant = [k for k, plan_index in enumerate(self.plan_indices) if plan_index < 0]
        self._sizes = [len(group.tensors) for group in groups]
        self._overlap = plan.overlap

    def release(self) -> None:
        """Let the buffers go; nothing is sent any more."""
        self._slots = [EMPTY_VIEW] * len(self._slots)

    def begin(self, number: int, now: Timestamp, profiling: bool = False) -> None:
        """Open a step; ``profiling`` says whether it matters when each gradient appears."""
        count = len(self.members)
        self.step = Step(number, [0] * count, [None] * count)
        self._events.append(self.step)
        self._restart(now, profiling)

    def withdraw(self, now: Timestamp, profiling: bool = False) -> bool:
        """Undo the open step's gradients, if the lane has read none of their events.

        If it returns False, some events may have been taken back all the same: the step has to be
        closed.
        """
        posted = sum(self._sizes) - sum(self._left)
        while posted:
            try:
                event = self._events.pop()
            except IndexError:
                return False
            assert event in range(len(self.members))  # others come before the first gradient
            posted -= 1
        step, count = self.step, len(self.members)
        step.addresses[:], step.owners[:] = [0] * count, [None] * count
        step.dependencies.clear()
        self._restart(now, profiling)
        return True

    def _restart(self, now: Timestamp, profiling: bool) -> None:
        count = len(self.members)
        self.begun = now
        self._transport.begin(self.step, profiling)
        self._accumulation.begin()
        self._left = list(self._sizes)
        self._ready: list[Timestamp] = [0.0] * count
        self._forward: list[Timestamp] = [0.0] * count
        self._forward_end: Timestamp = 0.0
        self._closed: Timestamp = 0.0
        self._regrown = False
        self.unplanned: dict[int, GradientRef] = {}

    def mark_ready(
        self, index: int, address: int, owner: object, time_s: float | None = None
    ) -> None:
        """A tensor's gradient exists (again).

        Args:
            index: into the specs.
            address: where it lies, contiguous.
            owner: kept alive until the step is over.
            time_s: since when, on the host (``time.perf_counter``); None for now.
        """
        accumulation = self._accumulation
        counts = accumulation.fired
        counts[index] = fired = counts[index] + 1
        expected = accumulation.expected[index]
        if fired != expected:
            if fired > expected:
                self._grown(index, address, owner)
            return
        plan_index = self.plan_indices[index]
        if plan_index < 0:
            self.unplanned[index] = (address, owner)
            return
        step = self.step
        step.addresses[plan_index] = address
        step.owners[plan_index] = owner
        self._ready[plan_index] = self._produced() if time_s is None else time_s
        group = self._group_of[plan_index]
        left = self._left[group] - 1
        self._left[group] = left
        if left == 0 and self._group_complete is not None and self._may_have_left(plan_index):
            self._group_complete(group)
        self._events.append(plan_index)
        if left == 0 and self._overlap and self._thread.sleeping:
            self._post(self._wake)

    def drop(self, index: int) -> None:
        """A tensor's gradient that was announced is gone: this rank has none now."""
        plan_index = self.plan_indices[index]
        if plan_index < 0:
            self.unplanned.pop(index, None)
        elif self.step.addresses[plan_index]:
            if self._may_have_left(plan_index):
                self.unplanned[index] = (0, None)
            else:
                self.step.addresses[plan_index] = 0
                self.step.owners[plan_index] = None

    def mark_forward(self, index: int) -> None:
        """A tensor is used for the first time in this step's forward."""
        plan_index = self.plan_indices[index]
        if plan_index >= 0 and not self._forward[plan_index]:
            self._forward[plan_index] = self._transport.now()

    def mark_forward_end(self) -> None:
        """Forward has ended, as far as is known yet."""
        self._forward_end = self._transport.now()

    @property
    def open(self) -> bool:
        """Whether gradients have appeared since the step began."""
        return any(self._accumulation.fired)

    @property
    def sending(self) -> bool:
        """Whether messages of the open step are on their way, as far as this thread can tell."""
        return self._overlap and self._left[0] == 0 and len(self._left) > 1

    def close(self, targets: Sequence[int] = ()) -> None:
        """Take up gradients for which no event came; have whole ones copied to ``targets``."""
        step = self.step
        self._all_ready = all(step.addresses)
        late = [] if self._all_ready else self._take_up_unannounced()
        for index in self._dormant:
            if index not in self.unplanned and (source := self._fetch(index)) is not None:
                self.unplanned[index] = source
        self._mark_closed(late)
        self._alias_check.check(self._who, step.addresses, self.unplanned)
        if targets:
            step.targets = [0 if k in self.unplanned else targets[k] for k in self.members]

    def close_discarded(self) -> None:
        """Close a step whose results are dropped.

        They must not overwrite a gradient of this rank, also of a tensor that had none in this
        step: the next step may add to it.
        """
        self._mark_closed(self._take_up_unannounced())

    def _take_up_unannounced(self) -> list[int]:
        """Take up gradients for which no event came; returns their plan indices."""
        step = self.step
        late = []
        for plan_index, address in enumerate(step.addresses):
            if not address and (source := self._fetch(self.members[plan_index])) is not None:
                step.addresses[plan_index], step.owners[plan_index] = source
                late.append(plan_index)
        return late

    def _mark_closed(self, late: Sequence[int]) -> None:
        """Groups that have not left may go from this moment, which is behind all copies that
        ``fetch`` has made; ``late`` are the gradients taken up."""
        self._closed = self._transport.close(self.step)
        for plan_index in late:
            self._ready[plan_index] = self._closed

    def reduced(self, present: Sequence[bool]) -> list[BufferView | None]:
        """Where each reduced gradient lies; None where no rank had one, or it is at its target."""
        for group, buffer in enumerate(self._buffers):
            if buffer.num_moves != self._num_moves[group]:
                self._move(group)
        views: list[BufferView | None] = [None] * len(self.specs)
        targets = self.step.targets or [0] * len(present)
        for plan_index, here in enumerate(present):
            if here and not targets[plan_index]:
                views[self.members[plan_index]] = self._slots[plan_index]
        return views

    def _move(self, group: int) -> None:
        """The tensors of a group have been reduced in other memory than before."""
        buffer = self._buffers[group]
        self._num_moves[group] = buffer.num_moves
        for position, plan_index in enumerate(self._groups[group]):
            slot = self._transport.view(buffer.slot(position), self._slots[plan_index].whole)
            self._slots[plan_index] = slot
            self._alias_check.add(self.members[plan_index], slot)

    def timestamps(
        self,
        result: StepResult,
        done: Timestamp,
        updates: Sequence[Span],
        waits: Sequence[Span],
        allgather: Sequence[GroupTime],
    ) -> StepTimestamps:
        """When things happened in the step."""
        return StepTimestamps(
            self.begun, self._ready, self._forward, self._forward_end, self._closed,
            done, updates, waits, result.times, allgather,
        )  # fmt: skip

    def unplanned_gradient(self, index: int) -> GradientRef:
        """All of this rank's gradient of a tensor that is reduced at the end of the step."""
        if index in self.unplanned:
            return self.unplanned[index]
        plan_index = self.plan_indices[index]
        if plan_index < 0 or not self.step.addresses[plan_index]:
            return 0, None
        # It grew on another rank only; what the message brought lacks that rank's last part.
        address = self.step.addresses[plan_index]
        if self.step.targets and self.step.targets[plan_index] == address:
            raise WfbpError(
                f"{self._who}: another rank sends the gradient of {self.specs[index].name} anew, "
                "and here the average has replaced it: the ranks run different programs"
            )
        return address, self.step.owners[plan_index]

    def learn_passes(self) -> None:
        """Expect as many backward passes per step as were seen."""
        if not self._all_ready or self.unplanned or self._regrown:
            self._accumulation.learn()

    def _grown(self, index: int, address: int, owner: object) -> None:
        """A gradient grew after its tensor was posted: it is sent as it is now."""
        plan_index = self.plan_indices[index]
        self._regrown = True
        if plan_index < 0:
            self.unplanned[index] = (address, owner)
            return
        self._ready[plan_index] = self._produced()
        if self._may_have_left(plan_index):
            self.unplanned[index] = (address, owner)
        else:
            self.step.addresses[plan_index] = address
            self.step.owners[plan_index] = owner

    def _may_have_left(self, plan_index: int) -> bool:
        """Whether a tensor's group may be on its way."""
        group = self._group_of[plan_index]
        return self._overlap and self._left[group] == 0 and group < len(self._left) - 1

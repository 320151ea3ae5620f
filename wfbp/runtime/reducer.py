"""The training side of one optimizer's gradients, from ready events to averaged values."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

from wfbp.comm.arrays import Buffer
from wfbp.comm.locations import Location, in_host_memory
from wfbp.comm.memory import Dependencies, Stamp
from wfbp.core.cost import Costs
from wfbp.core.types import CODECS, TensorSpec
from wfbp.errors import WfbpError
from wfbp.runtime import compression_guard
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.compression_guard import CompressionGuard
from wfbp.runtime.consistency import SAME_TENSORS, describe_specs
from wfbp.runtime.gathers import Gathers, group_of_each
from wfbp.runtime.heap import give_back_freed_memory, keep_freed_memory
from wfbp.runtime.lane import Lane
from wfbp.runtime.measuring import StepClock
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.recorder import Recorder, log_summary, make_report
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import (
    BufferView,
    Close,
    GradientRef,
    GroupReady,
    Outcome,
    Step,
    StepResult,
    Used,
)
from wfbp.runtime.tuning.tuner import Tuner

T = TypeVar("T")

SAMPLED_STEPS = 16
"""With a chosen plan and no recorder, one step in this many is timed."""

_PATIENCE_STEPS = 8
"""If a parameter gets fewer gradients for this many steps, fewer are expected."""


class Reducer:
    """Averages the gradients of a fixed list of tensors, step after step.

    A rank updates its shards of decoupled tensors, then :attr:`gathers` brings the others' during
    the next forward. A round at the end of a step, on request of any rank, reduces gradients
    outside the plan and lets the tuner choose plans. Tensors are known by their index into
    ``specs``.

    Threads: any thread may call :meth:`mark_ready`, one at a time: autograd's of a GPU, or XLA's
    under the lock of JAX's exchanges. All other methods are for the training thread.
    """

    def __init__(
        self,
        runtime: Runtime,
        specs: Sequence[TensorSpec],  # in forward order, equal on every rank, as ``options``
        options: ReducerOptions,
        *,
        active: Sequence[bool] | None = None,  # per tensor, whether to expect a gradient
        compared: Mapping[str, object] = MappingProxyType({}),  # must be equal on every rank
        location: Location = in_host_memory,  # of the tensors
        fetch: Callable[[int], GradientRef | None] = lambda index: None,
        channel: ControlChannel | None = None,
    ) -> None:
        options.check(specs)
        given = options
        if not runtime.backend.encodes:
            options = options.without_codecs()
        # The tensors, and the ranks that reduce them.
        self.specs = tuple(specs)
        self._number_of = {spec: k for k, spec in enumerate(specs)}
        self._runtime = runtime
        self._options = options
        self._name = name = options.name
        self.who = f"{runtime.where}: {name}"
        self._fetch = fetch  # for gradients without an event, when the step closes

        # Its plan, and what ranks must have in common.
        self.num_installed = 0
        self._newly_installed = False  # whether the next step is the first one by the final plan
        gets = {s.name: active is None or active[k] for k, s in enumerate(specs)}
        planned = [spec for spec in specs if gets[spec.name]] or specs[:1]
        is_logger = runtime.rank == 0
        self.tuner = Tuner(runtime.config, options, planned, runtime.size, is_logger=is_logger)
        channel = channel or runtime.channel
        settings = {
            **compared,
            "schedule": options.schedule,
            "threshold_bytes": options.threshold_bytes,
            "op": str(options.op),
            "compression": given.wire or "none",
            "exceptions from compression": given.wires,
            "compression_guard": given.guard,
            "shares the update": options.decouples,
            "plan": self.tuner.plan.digest,
        }
        what = "comparing tensors"
        same = (
            describe_specs(specs),
            {f"whether {spec} gets a gradient": expected for spec, expected in gets.items()},
            settings,
        )
        channel.exchange(b"", f"{name}: {what}", what, same, SAME_TENSORS)

        # Communication: its lane, and collectives between steps.
        with runtime.in_turn(channel, f"{name}: making a lane"):
            backend, control_backend = runtime.lease(channel)
            self.memory = memory = location(runtime, backend, channel.call)
        wires = [options.wire_of(spec, runtime.size, options.choices[-1]) for spec in specs]
        self.encoded = [k for k, wire in enumerate(wires) if wire in CODECS]
        """Tensors that a plan may encode."""
        if memory.sends_flags_separately and self.encoded:
            raise ValueError(
                f"{self.who}: gradients are encoded in the memory of hosts, and these are on a "
                "device; use compression='bf16' or 'auto:bf16'"
            )
        # Separate, because ranks may end the steps of several reducers in different orders.
        self.channel = runtime.channel_on(control_backend, name)
        self._lane = lane = Lane(backend, memory, options, specs)
        self._events, self._thread = lane.events, runtime.thread
        self._guard = CompressionGuard(lane, self.channel, options, self.specs, is_logger)
        self._closed = False

        # Steps: their numbers, and the gradients that each tensor gets.
        self._number = 0
        self._discarded: deque[Step] = deque()
        self._expected = [options.passes] * len(specs)
        self._rarer_steps = 0
        self.outcome = Outcome()  # of the last one that was reduced
        self.used_scale = 1.0
        """The factor that the program has applied to the last averages before it used them; 0 if it
        has not used them. Errors of encoding shrink alike."""
        self.fell_back = False

        # Times of steps, and who wants them.
        self.num_steps = 0
        self.clock = StepClock(memory, len(specs))
        self.gathers = Gathers(lane, memory, self._thread, self.clock, self.specs, name)
        self._detailed = True  # whether all moments of a step are used, and not only its length
        self._record_name = runtime.distinct_name(name)
        recorded = bool(runtime.config.record)
        self.recorder = Recorder(runtime, self._record_name, self.tuner) if recorded else None

        keep_freed_memory()
        self._install()
        runtime.add_lane(lane)
        runtime.users.add(self)
        self._begin(memory.now())

    # One step: gradients appear.

    def _begin(self, now: Stamp) -> None:
        """Open a step; its first event brings it to the lane."""
        count = len(self.specs)
        self._step = step = Step(self._number, [0] * count, [None] * count, self._sizes[:])
        self._lane.open_step = step
        self._sources, self._owners, self._missing = step.sources, step.owners, step.missing
        self._due = self._expected[:]
        self._num_posted = 0
        self._unplanned: dict[int, GradientRef] = {}
        self.clock.begin(now)
        self._ready = self.clock.ready
        self.memory.begin(self.profiling)

    def mark_ready(
        self, index: int, address: int, owner: object, time_s: float | None = None
    ) -> None:
        """A contiguous gradient exists, since ``time_s`` (``perf_counter``; None: now)."""
        due = self._due
        due[index] = left = due[index] - 1
        if left:
            if left < 0:
                self._mark_grown(index, address, owner)
            return
        self._sources[index] = address
        self._owners[index] = owner
        self._ready[index] = self.memory.stamp_gradient() if time_s is None else time_s
        missing, group = self._missing, self._group_of[index]
        missing[group] = left = missing[group] - 1
        if not left and group == self._num_posted:
            self._post_groups()

    def _post_groups(self) -> None:
        """Send complete groups in the plan's order, up to the first incomplete one."""
        missing, step, last = self._missing, self._step, self._num_early
        group = self._num_posted
        if group >= last:
            return
        dependencies = self.memory.gradient_dependencies()
        if not group:
            self._tell_use()
        while group < last and not missing[group]:
            # After all writes to the step: the lane may read it from here on.
            self._events.append(GroupReady(step, group, dependencies))
            group += 1
        self._num_posted = group
        if self._thread.needs_wakeup:  # set before that thread's last look at the events
            self._thread.loop.wakeup.set()

    def _tell_use(self) -> None:
        """Before the first event of a step: what became of the last averages."""
        if self.encoded and self.used_scale != 1:
            self._events.append(Used(self.used_scale))
        self.used_scale = 1.0

    def _may_have_left(self, index: int) -> bool:
        """Whether a tensor's group may have been sent."""
        return 0 <= self._group_of[index] < self._num_posted

    def _mark_grown(self, index: int, address: int, owner: object) -> None:
        """A gradient grew after its tensor was ready: send it as it is now, or in the round."""
        self._ready[index] = self.memory.stamp_gradient()
        if self._may_have_left(index):
            self._unplanned[index] = (address, owner)
        else:
            self._sources[index], self._owners[index] = address, owner

    def drop(self, index: int) -> None:
        """A tensor's announced gradient is gone: this rank has none now."""
        if not self._may_have_left(index):
            self._sources[index], self._owners[index] = 0, None
        elif self._sources[index]:
            self._unplanned[index] = (0, None)

    @property
    def early_groups(self) -> list[int]:
        """By tensor, the group that may be sent before the step is closed, or -1."""
        return [group if group < self._num_early else -1 for group in self._group_of]

    @property
    def open(self) -> bool:
        """Whether gradients have appeared that no step has taken."""
        return self._due != self._expected

    # One step: it closes.

    def synchronize(
        self,
        whole: bool = True,
        targets: Sequence[int] = (),
        *,
        sparse: Collection[int] = (),  # tensors with sparse gradients, which the caller exchanges
        joined: bool = False,  # this rank has no more data, and takes part without gradients
        closing_call: int = 0,  # which call closes the step, below 64; 0 for ``step()``
        mark: int | None = None,  # of this rank's parameters; None agrees with any
        evaluates: bool = False,  # the step is an evaluation of a closure
    ) -> list[BufferView | None]:
        """Close the step and wait until every gradient is reduced; ``WfbpError`` if ranks failed.

        Returns a view per tensor (or of its shard) until the next step's first gradient; None if no
        rank had one, or if it was copied to its target. Views are ``whole`` if any rank needs that.
        ``targets`` may be the gradients' addresses. Signals must be deferred.
        """
        if self._closed:
            self._runtime.check()
        step, tuner = self._step, self.tuner
        all_ready, dependencies = self._take_up_rest()
        self._check_aliases()
        if targets:
            step.targets = [0 if k in self._unplanned else a for k, a in enumerate(targets)]
        step.whole = whole and self.decoupled
        step.requested = bool(self._unplanned or tuner.wants_round or sparse or joined)
        step.closing_call = None if joined else closing_call
        step.mark = None if joined else mark
        result = self._close_step(dependencies)
        self.outcome = Outcome(result.marks_agree)
        if self._newly_installed:
            # First step by the final plan: memory of earlier plans is free now.
            self._newly_installed = False
            give_back_freed_memory()
        if self.decoupled:
            self.gathers.flush()
        done = self.memory.join()
        reduced = self._views_of(result)
        if not all_ready or min(self._due) < 0:
            self._learn_passes()
        plan = tuner.plan
        if any(result.present) or result.requested:
            self._measure(result, done)
        else:  # without any gradient this is no step of training, but a part of the next one
            done = self.clock.begun
        if result.requested or tuner.round_due:
            mine = {"sparse": sorted(sparse), "joined": joined, "evaluates": evaluates}
            self._hold_round(mine, reduced)
        elif self.encoded and tuner.installed and not targets:
            self._guard_compression(result, reduced)
        whole = result.whole
        whole |= bool(self.outcome.joined)  # these ranks use no shards
        whole |= tuner.plan.decoupled != plan.decoupled
        if self.decoupled and whole:
            reduced = self.gathers.gather_gradients(reduced)
            self.gathers.flush()
        if tuner.plan is not plan:
            self._install()
        step.owners = []  # gradients that were sent are no longer needed
        self._detailed = not tuner.installed or bool(self.recorder or self._runtime.timeline)
        self.memory.timing = self._detailed or self.num_steps % SAMPLED_STEPS == 0
        self._begin(done)
        return reduced

    def _close_step(self, dependencies: Dependencies) -> StepResult:
        """Send the rest of the step, and wait until all of it is reduced."""
        thread, lane, step = self._thread, self._lane, self._step
        if not self._num_posted:
            self._tell_use()
        self._events.append(Close(step, dependencies))
        while self._discarded:  # the lane replies to these first
            thread.await_reply(lane.reply, self._name)
            self._discarded.popleft()
        result: StepResult = thread.await_reply(lane.reply, self._name)
        while result.discarded:
            # Another rank discarded gradients by zero_grad() and takes part once more, so this
            # rank sends its own again.
            self._number += 1
            step.number = self._number
            self._events.append(Close(step, ()))
            result = thread.await_reply(lane.reply, self._name)
        self._number += 1
        return result

    def _take_up_rest(self) -> tuple[bool, Dependencies]:
        """Take up gradients without events; whether the plan's had none, and dependencies."""
        sources, owners, group_of = self._sources, self._owners, self._group_of
        late, all_ready = [], True
        if not all(sources):
            for index, address in enumerate(sources):
                if address:
                    continue
                all_ready = all_ready and group_of[index] < 0
                if (source := self._fetch(index)) is not None:
                    sources[index], owners[index] = source
                    late.append(index)
        for index in self._dormant:
            if sources[index]:
                self._unplanned[index] = sources[index], owners[index]
        dependencies = self.clock.close()  # after all copies that ``fetch`` has made
        for index in late:
            self._ready[index] = self.clock.closed
        return all_ready, dependencies

    def _check_aliases(self) -> None:
        """Raise ``RuntimeError`` if a gradient shares memory with another tensor's average."""
        # One average could overwrite the other gradient before it is packed.
        owner_of, specs = self._owner_of, self.specs
        if owner_of.keys().isdisjoint(self._sources) and not self._unplanned:
            return
        grown = [(k, address) for k, (address, _) in self._unplanned.items()]
        for index, address in [*enumerate(self._sources), *grown]:
            owner = owner_of.get(address, index)
            if owner != index and specs[index].numel:
                raise RuntimeError(
                    f"{self.who}: the gradient of {specs[index].name} shares memory with "
                    f"the average of {specs[owner].name}; give each tensor its own gradient, for "
                    "example by clone()"
                )

    def _views_of(self, result: StepResult) -> list[BufferView | None]:
        """Views of all reduced gradients; None if no rank had one, or if it is at its target."""
        for group, buffer in enumerate(self._buffers):
            if buffer.num_moves != self._num_moves[group]:
                self._view(group)
        targets = self._step.targets
        if not targets and all(result.present):
            return self._views.copy()
        views: list[BufferView | None] = [None] * len(self.specs)
        for index, here in zip(self._planned, result.present, strict=True):
            if here and not (targets and targets[index]):
                views[index] = self._views[index]
        return views

    def _view(self, group: int) -> None:
        buffer = self._buffers[group]
        self._num_moves[group] = buffer.num_moves
        while buffer.dropped:
            self._owner_of.pop(buffer.dropped.pop(), None)
        for position, index in enumerate(self._members[group]):
            self._views[index] = view = buffer.view(position)
            # (Of a tensor without elements the address may be another one's.)
            if view.whole and self.specs[index].numel:
                self._owner_of[view.address] = index

    def _learn_passes(self) -> None:
        """Expect as many passes as this step had: more at once, fewer after some steps."""
        expected = self._expected
        fired = [count - due for count, due in zip(expected, self._due, strict=True)]
        rarer = any(0 < count < most for count, most in zip(fired, expected, strict=True))
        self._rarer_steps = self._rarer_steps + 1 if rarer else 0
        if self._rarer_steps >= _PATIENCE_STEPS:
            self._rarer_steps, expected = 0, [1] * len(expected)
        self._expected = list(map(max, fired, expected))

    def discard(self) -> None:
        """Forget the open step's zeroed gradients; raises if an earlier discard failed."""
        reply = self._lane.reply
        while self._discarded and reply.answered:
            reply.get()
            self._discarded.popleft()
        if not self.open and not any(self._sources):
            return
        # The lane takes from the other end of the deque, whose operations are atomic.
        with suppress(IndexError):  # the lane has read events, and may have sent the step
            while self._num_posted:
                self._events.pop()
                self._num_posted -= 1
        if self._num_posted:
            # Complete the step, and drop its results. Do not wait for it: other ranks may have had
            # no gradients to discard, and arrive later. Gradients without event take part, so that
            # no result overwrites them: the next step may add to them.
            step = self._step
            step.discards, step.closing_call = True, None
            _, dependencies = self._take_up_rest()
            self._events.append(Close(step, dependencies))
            # Its gradients may be read until its messages have arrived. Until then the lane reads
            # no further events, so that later steps are withdrawn: never more than two are kept.
            self._discarded.append(step)
            self._number += 1
            self._thread.loop.wakeup.set()
        self._begin(self.memory.now())

    # Between steps: measurements and the next plan.

    def _measure(self, result: StepResult, done: Stamp) -> None:
        """Count a step, and let the tuner know what it took."""
        self.num_steps += 1
        tuner, timeline, recorder = self.tuner, self._runtime.timeline, self.recorder
        # Without details only the length of the step is used.
        self.clock.finish(self._planned if self._detailed else (), result.stamps, done)
        counting = not (tuner.measuring or tuner.installed)
        for times in self.clock.take(counting, tuner.measuring):
            if recorder is not None:
                recorder.after_step(self.num_steps, times)
            if timeline is not None and times.done_s:
                timeline.step(self._record_name, self.num_steps - 1, tuner.plan, times)
            if tuner.visit.add(times):
                tuner.complete()
        often = self._runtime.config.summary_steps
        if often and self._runtime.rank == 0 and self.num_steps % often == 0:
            log_summary(self._name, self.report())

    def _guard_compression(self, result: StepResult, reduced: Sequence[BufferView | None]) -> None:
        """Now and then compare an encoded average with an exact one; a collective."""
        options, step = self._options, self._step
        if options.guard == "off" or self.num_steps % compression_guard.EVERY_STEPS:
            return
        wires = self.tuner.wire_of_each
        codecs = {
            index: codec
            for index, here in zip(self._planned, result.present, strict=True)
            if here and (codec := wires[self.specs[index]]) in CODECS
        }
        if codecs and self._guard.compare(self.num_steps, codecs, step, reduced):
            self._options = self._lane.options = options.in_16_bits()
            self._lane.errors.forget()
            self.encoded, self.fell_back = [], True
            self.tuner.use(self._options)

    def _install(self) -> None:
        """Use the tuner's plan from now on; no step is under way."""
        plan = self.tuner.plan
        self.gathers.flush()
        number_of, count = self._number_of, len(self.specs)

        # Its groups: tensors of each, and the group of each tensor, or -1.
        self._planned = [number_of[spec] for spec in plan.tensors]
        members = [[self._planned[k] for k in group.tensors] for group in plan.groups]
        num_backward = plan.num_backward
        self._members = members[:num_backward]
        self._num_early = plan.num_early
        self._group_of = group_of_each(self._members, count)
        self._dormant = [k for k, group in enumerate(self._group_of) if group < 0]
        # The last entry is for dormant tensors, of group -1, and never reaches 0.
        self._sizes = [*map(len, self._members), sys.maxsize]
        self.decoupled = len(members) > num_backward  # whether it decouples any tensor
        self.gathers.install(members[num_backward:], self.tuner.installed)

        # Its results: views of reduced tensors, and the tensor at each address.
        costs = self.tuner.message_costs
        self._buffers = self._lane.install(plan, self._planned, costs)[:num_backward]
        self._num_moves = [0] * num_backward
        self._views: list[BufferView | None] = [None] * count
        self._owner_of: dict[int, int] = {}
        for group in range(num_backward):
            self._view(group)

        self.num_installed += 1
        self.clock.forget()
        if self.tuner.installed:
            self._newly_installed = True
        self.memory.trim()
        self.profiling: bool = self.tuner.profiling  # whether times of steps will be used to plan

    def _hold_round(self, mine: dict[str, object], reduced: list[BufferView | None]) -> None:
        """Reduce unplanned gradients and tune; collective."""
        tuner, due = self.tuner, self.tuner.round_due
        mine |= {"unplanned": sorted(self._unplanned), "tuner": tuner.message()}
        messages = self.channel.exchange_values(mine, "end of the step")
        self.outcome = replace(
            self.outcome,
            sparse=sorted({k for message in messages for k in message["sparse"]}),
            joined=[rank for rank, message in enumerate(messages) if message["joined"]],
            evaluated=any(message["evaluates"] for message in messages),
        )
        unplanned = sorted({k for message in messages for k in message["unplanned"]})
        if unplanned:
            self._lane.errors.scale(unplanned, 0)
            views = self._lane.reduce_now(
                self.channel,
                [self.specs[k] for k in unplanned],
                [self._unplanned_gradient(k) for k in unplanned],
            )
            for index, view in zip(unplanned, views, strict=True):
                reduced[index] = view
        joining = [self.specs[k] for k in unplanned if self._group_of[k] < 0]
        wished = any(message["tuner"].get("wants_round") for message in messages)
        if joining:
            tuner.add_tensors(joining)
        elif due or wished:
            tuner.decide([m["tuner"] for m in messages], self._measure_costs, self._share)
        if joining or due or wished:
            self.channel.exchange(b"", f"the plan {tuner.plan.digest}")  # which must be the same

    def _unplanned_gradient(self, index: int) -> GradientRef:
        """All of this rank's gradient of a tensor that is reduced at the end of the step."""
        if index in self._unplanned:
            return self._unplanned[index]
        address = self._sources[index]
        # It grew on another rank only, after that rank had sent it.
        if address and self._step.targets and self._step.targets[index] == address:
            raise WfbpError(
                f"{self.who}: another rank sends the gradient of {self.specs[index].name} anew, "
                "and here the average has replaced it: the ranks run different programs"
            )
        return address, self._owners[index]

    def _measure_costs(self) -> Costs:
        nbytes, tuner = sum(spec.nbytes for spec in self.specs), self.tuner
        backend, call = self.memory.backend, self.channel.call
        with self._runtime.in_turn(self.channel, "measuring the network"):
            return self._runtime.network.measure(
                nbytes, tuner.operations, tuner.doubts_costs, backend, call
            )

    def _share(self, compute: Callable[[], T]) -> T:
        """Rank 0's result of ``compute``, in JSON's types; collective."""
        value = compute() if self._runtime.rank == 0 else None
        result: T = self.channel.exchange_values(value, "planning")[0]
        return result

    # The whole run.

    @property
    def may_decouple(self) -> bool:
        """Whether any plan may leave this rank shards of gradients."""
        return len(self.tuner.operations) > 1

    def errors_of_encoding(self) -> dict[str, Buffer]:
        """This rank's rounding errors (float32), which the next step makes up for, by tensor that a
        plan may encode; those of its shard of the sum by the name with ", sum". Call it between
        steps."""
        found = {}
        for index in self.encoded:
            name = self.specs[index].name
            found[name], found[f"{name}, sum"] = self._lane.errors.of(index)
        return found

    def report(self) -> dict[str, Any]:
        """The installed plan and what it costs; see :func:`make_report`."""
        return make_report(self.tuner, self.num_steps) | {
            "compression_sample": self._guard.samples.latest
        }

    def close(self) -> None:
        """Stop serving this reducer; collective only in that every rank stops using it."""
        if self._closed:
            return
        self._closed = True
        self._runtime.remove_lane(self._lane)
        if self.recorder is not None:
            self.recorder.write()

    def release(self) -> None:
        """Release the buffers after communication ends; reduced gradients become invalid."""
        self._lane.buffers.clear()
        self._buffers = []
        self._views = [None] * len(self.specs)
        self.gathers.release()

"""The engine: one optimizer's gradients, from ready events to averaged values.

The training thread calls :meth:`Engine.mark_ready` as gradients appear and
:meth:`Engine.synchronize` when it needs them averaged; between the two, the communication thread
sends by the installed plan. Where the plan decouples tensors, a rank gets its shards of them,
updates them, and calls ``Engine.gather``, which brings the others' while the next forward runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from wfbp.comm.device.device import Device
from wfbp.core.plan import Plan
from wfbp.core.types import TensorSpec
from wfbp.runtime import consistency
from wfbp.runtime.arguments import EngineOptions
from wfbp.runtime.engine.allgather import AllGatherState, GradientAssembler
from wfbp.runtime.engine.allocator import give_back_freed_memory, keep_freed_memory
from wfbp.runtime.engine.recorder import Recorder, log_summary, make_report, make_stats
from wfbp.runtime.engine.step_sync import StepSynchronizer, exchange_payloads
from wfbp.runtime.engine.tracker import GradientTracker
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.progress.plan_executor import PlanExecutor
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import (
    CLOSE,
    DISCARD,
    BufferView,
    GradientRef,
    Span,
    Step,
    StepResult,
    StepTimestamps,
    Timestamp,
)
from wfbp.runtime.tuning.profile import TuningPhase
from wfbp.runtime.tuning.tuner import Tuner

SAMPLED_STEPS = 16
"""Once plans are chosen and nobody records, groups and updates are timed in every so many steps."""

_MOST_UPDATES = 4096
"""So many are kept while no step with gradients follows, as in a program that steps without any."""


class Engine:
    """Averages the gradients of a fixed list of tensors, step after step.

    Used by one training thread; the lane carries everything to the communication thread.

    Args:
        runtime: an initialised runtime with more than one rank.
        specs: the tensors, in forward order as far as it is known; equal on every rank.
        options: equal on every rank.
        active: per tensor, whether a gradient is expected; the others join when one appears.
        compared: what else must be the same on every rank, by its name in messages.
        device: on which all tensors lie; the host by default.
        fetch: returns the gradient of a tensor for which no event came, or None; called when the
            step closes.
        channel: on which ranks make the engine; the runtime's own by default.

    Raises:
        ValueError: bad arguments.
        ImportError: ``dear`` without the ``search`` extra.
        DisagreementError: other ranks passed other tensors or settings.
    """

    sparse: Collection[int] = ()
    """The tensors of which this rank has sparse gradients in this step, which its caller exchanges;
    set before :meth:`synchronize`."""
    sparse_anywhere: Sequence[int] = ()
    """The same of any rank, in the step that was reduced last."""
    joined = False
    """Whether this rank has no more data, and takes part without gradients; set by its caller."""
    joined_ranks: Sequence[int] = ()
    """The ranks that had joined in the step that was reduced last."""
    evaluates = False
    """Whether this step is an evaluation of a closure; set by its caller."""
    evaluated = False
    """The same of any rank, in the step that was reduced last, if ranks have joined."""
    profiling = False
    """Whether this step's times will be used to plan."""
    num_installed = 0
    """How many plans have been installed."""

    def __init__(
        self,
        runtime: Runtime,
        specs: Sequence[TensorSpec],
        options: EngineOptions,
        *,
        active: Sequence[bool] | None = None,
        compared: Mapping[str, Any] = MappingProxyType({}),
        device: Device | None = None,
        fetch: Callable[[int], GradientRef | None] = lambda index: None,
        channel: ControlChannel | None = None,
    ) -> None:
        options.check(specs)
        self.specs = tuple(specs)
        self._runtime = runtime
        self._name = name = options.name
        chosen = [k for k in range(len(specs)) if active is None or active[k]] or [0]
        planned = [specs[k] for k in chosen]
        self._tuner = _make_tuner(runtime, options, planned)
        self._who = f"{runtime.where}: {name}"
        channel = channel or runtime.channel
        self._compare(channel, options, compared, planned)
        with runtime.collective_lock.hold(channel, f"{name}: making a lane"):
            backend = runtime.lease(channel)
            self._transport = transport = runtime.make_transport(
                backend, device, channel, options.wire_dtype, options.gather_dtype
            )
        self._lane = PlanExecutor(backend, transport, options.op, name)
        self._tracker = tracker = GradientTracker(
            self.specs, self._lane, transport, runtime.thread, options.passes, fetch, self._who
        )
        own = runtime.channel_on(backend)
        self._step_sync = StepSynchronizer(
            runtime, own, tracker, transport, self._tuner, options.op, name, self._who
        )
        self._allgather = AllGatherState(runtime, self._lane, transport, name)
        self._assembler = GradientAssembler(
            self.specs,
            self._allgather,
            transport,
            runtime.rank,
            runtime.size,
            options.gather_dtype,
        )
        # Called for every tensor, in every step: without a call in between.
        self.mark_ready = tracker.mark_ready
        self.mark_forward = tracker.mark_forward
        self.await_tensor = self._allgather.wait
        self._steps = 0
        self._number = 0
        self._num_unread = 0
        self._updates: deque[Span] = deque(maxlen=_MOST_UPDATES)
        self._summary_steps = runtime.config.summary_steps if runtime.rank == 0 else 0
        self._kept: deque[StepTimestamps] = deque()
        self._unread: list[Step] = []
        self._closed = False
        self._newly_installed = False
        keep_freed_memory()
        self._install()
        runtime.add_lane(self._lane)
        runtime.add_user(self)
        self._record_name = runtime.distinct_name(name)
        self._recorder = _make_recorder(runtime, self._record_name, self.report)
        tracker.begin(self._number, transport.now(), self.profiling)

    def _compare(
        self,
        channel: ControlChannel,
        options: EngineOptions,
        compared: Mapping[str, Any],
        planned: Sequence[TensorSpec],
    ) -> None:
        """Raise unless every rank makes the same engine; collective."""
        settings = {
            **compared,
            "schedule": options.schedule,
            "threshold_bytes": options.threshold_bytes,
            "op": str(options.op),
            "compression": options.wire_dtype or "none",
            "decouples": options.decouples,
            "shares the update": options.sharded_update,
            "tensors with gradient": [spec.name for spec in planned],
            "plan": self._tuner.plan.digest,
        }
        payload = consistency.encode_specs(self.specs, settings)
        consistency.check_specs(
            self._who, exchange_payloads(channel, self._name, payload, "comparing tensors")
        )

    def now(self) -> Timestamp:
        """This moment, on the clock of the tensors' device; 0 where updates are not timed now."""
        return self._transport.now() if self._transport.timing else 0.0

    def name_model(self, name: str) -> None:
        """What is trained, for the record of the run."""
        if self._recorder is not None:
            self._recorder.model = name

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's payload, behind :meth:`synchronize`; collective."""
        return self._step_sync.exchange(payload, what)

    @property
    def may_decouple(self) -> bool:
        """Whether any plan may leave this rank shards of gradients."""
        return len(self._tuner.operations) > 1

    def mark_forward_end(self) -> None:
        """Forward has ended, as far as is known yet."""
        self._tracker.mark_forward_end()

    def mark_update(self, start: Timestamp) -> None:
        """An update by the optimizer, begun at ``start`` (:meth:`now`), has ended."""
        if start:
            self._updates.append((start, self._transport.now()))

    def drop(self, index: int) -> None:
        """A tensor's gradient that was announced is gone: this rank has none now."""
        self._tracker.drop(index)

    def gather(self, addresses: Sequence[int], owners: object, count: int | None = None) -> None:
        """Send this rank's shards of decoupled tensors, and receive the others'; see
        :meth:`AllGatherState.begin`. :meth:`gather_rest` lets the groups beyond ``count`` go."""
        self._allgather.begin(addresses, owners, count)

    def gather_rest(self) -> None:
        """Let the groups go that :meth:`gather` held back."""
        self._allgather.release_rest()

    def gather_gradients(
        self, reduced: Sequence[BufferView | None], kept: Collection[int] = ()
    ) -> list[BufferView | None]:
        """Gather shards of gradients; see :meth:`GradientAssembler.begin`."""
        return self._assembler.begin(reduced, kept)

    def flush(self) -> None:
        """Wait until everything that is gathered has arrived."""
        self._allgather.wait_all()

    def publish(self) -> None:
        """A parameter was updated by the calling thread, behind ``step()``: on a device, what the
        training thread does later finds it."""
        self._transport.publish()

    def decouples_tensor(self, index: int) -> bool:
        """Whether the plan decouples a tensor."""
        return self._allgather.gathered(index)

    @property
    def open(self) -> bool:
        """Whether gradients have appeared that no step has taken."""
        return self._tracker.open

    @property
    def gather_groups(self) -> Sequence[Sequence[int]]:
        """The tensors of each all-gather, by index, in the order of sending."""
        return self._allgather.groups

    @property
    def gather_pending(self) -> bool:
        """Whether all-gathers have not all arrived yet."""
        return self._allgather.pending

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._tuner.plan

    @property
    def decoupled(self) -> bool:
        """Whether the plan decouples any tensor."""
        return self._allgather.gatherable

    def synchronize(
        self, whole: bool = True, wanted: bool = False, targets: Sequence[int] = ()
    ) -> list[BufferView | None]:
        """Close the step and wait until every gradient is reduced.

        Args:
            whole: whether the caller needs whole gradients; the same on every rank. They are whole
                in any case where another plan decouples other tensors.
            wanted: the same, for this rank alone.
            targets: addresses, by tensor, to which whole reduced gradients are copied as they
                arrive; may be those of the gradients themselves.

        Returns:
            Per tensor, where its reduced gradient lies until the next step's first gradient; None
            where no rank had one, or where it was copied to its target. Of a decoupled tensor it
            may be this rank's shard.

        Raises:
            RuntimeError: a gradient lies where another tensor's is averaged.
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        tracker = self._tracker
        tracker.close(targets)
        wanted = wanted and self._allgather.gatherable
        tracker.step.requested = bool(
            wanted or tracker.unplanned or self._tuner.wants_round or self.sparse or self.joined
        )
        self._close()
        result = self._await_result()
        while result.discarded:
            # That rank had gradients before zero_grad() that this rank had not, or not all.
            self._number += 1
            tracker.step.number = self._number
            self._close()
            result = self._await_result()
        return self._conclude(result, whole, wanted)

    def _conclude(self, result: StepResult, whole: bool, wanted: bool) -> list[BufferView | None]:
        """After the step's messages: exchange unplanned gradients, and begin the next step."""
        tracker = self._tracker
        if self._newly_installed:
            # the first step by the plan that stays: nothing is left of others
            self._newly_installed = False
            give_back_freed_memory()
        self._allgather.wait_all()
        done = self._transport.join()
        self._unread.clear()
        reduced = tracker.reduced(result.present)
        tracker.learn_passes()
        self._number += 1
        planned, phase = self._tuner.plan, self._tuner.phase
        if any(result.present) or result.requested:
            self._measure(result, done)
        else:  # nobody had a gradient: this is no step of training, but a part of the next one
            done = tracker.begun
        self.sparse_anywhere, self.joined_ranks, self.evaluated = (), (), False
        if result.requested or self._tuner.round_due:
            status = {"joined": self.joined, "evaluates": self.evaluates}
            whole |= self._step_sync.run(reduced, wanted, self.sparse, status)
            self.sparse_anywhere = self._step_sync.sparse
            statuses = self._step_sync.statuses
            self.joined_ranks = [rank for rank, one in enumerate(statuses) if one["joined"]]
            self.evaluated = any(one["evaluates"] for one in statuses)
            whole |= bool(self.joined_ranks)  # joined ranks use no shards
        changed = self._tuner.plan is not planned
        whole |= changed and self._tuner.plan.decoupled != planned.decoupled
        if self._allgather.gatherable and whole:
            reduced = self._assembler.begin(reduced)
            self._allgather.wait_all()
        if changed:
            self._install()
        if self._tuner.phase != phase:  # a trial may have ended with the plan it tried last
            self._newly_installed = self._tuner.phase is TuningPhase.INSTALLED
            self._lane.costs = self._tuner.message_costs
            if self._tuner.phase is not TuningPhase.TRIAL:
                self._assembler.trim()
        tracker.step.owners = []  # gradients that were sent are no longer needed
        self._transport.timing = self._times_groups
        tracker.begin(self._number, done, self.profiling)
        return reduced

    @property
    def _times_groups(self) -> bool:
        """Whether the times of the next step's groups, and of updates before it, will be used."""
        if self._tuner.phase is not TuningPhase.INSTALLED:
            return True
        observed = self._recorder is not None or self._runtime.timeline is not None
        return observed or self._steps % SAMPLED_STEPS == 0

    def _measure(self, result: StepResult, done: Timestamp) -> None:
        """Count a step, and let the tuner know what it took."""
        self._steps += 1
        times = self._allgather.take_times()
        updates = list(self._updates)
        self._updates.clear()
        self._kept.append(self._tracker.timestamps(result, done, updates, *times))
        for measured in self._transport.take_measured(self._kept, self._tuner.phase):
            if self._recorder is not None:
                self._recorder.after_step(self._tuner, measured.stamps, measured.times)
            if self._runtime.timeline is not None and measured.stamps.done_s:
                plan = self._tuner.plan
                self._runtime.timeline.step(self._record_name, self._steps, plan, measured)
            self._tuner.after_step(measured.stamps)
        if self._summary_steps and self._steps % self._summary_steps == 0:
            log_summary(self._name, self.stats())

    def discard(self) -> None:
        """Forget the gradients of the open step, which were zeroed before they were used.

        Raises ``WfbpError`` if an earlier discarded step has failed.
        """
        tracker, lane = self._tracker, self._lane
        while self._num_unread and lane.reply.answered:
            lane.reply.get(timeout_s=0.0)
            self._num_unread -= 1
            self._unread.pop(0)
        if not tracker.open or tracker.withdraw(self._transport.now(), self.profiling):
            return
        if tracker.sending:
            # The step is seen through, what it brings is dropped. Not waited for, because other
            # ranks, which may have had no gradients to discard, need not be here.
            tracker.step.discards = True
            self._number += 1
            tracker.close_discarded()
            lane.events.append(CLOSE)
            self._num_unread += 1
            # Its gradients may be read until its messages have come in. By then the lane knows of
            # no later step, so that those are withdrawn: never more than two are kept.
            self._unread.append(tracker.step)
        else:
            lane.events.append(DISCARD)
        self._runtime.post(lane.wake)
        tracker.begin(self._number, self._transport.now(), self.profiling)

    def close(self) -> None:
        """Stop serving this engine; collective only in that every rank stops using it."""
        if self._closed:
            return
        self._closed = True
        self._runtime.remove_lane(self._lane)
        if self._recorder is not None:
            self._recorder.write()

    def release(self) -> None:
        """Let the buffers go, behind the end of communication; reduced gradients are void then."""
        self._lane.release()
        self._tracker.release()
        self._assembler.forget()

    def report(self) -> dict[str, Any]:
        """The installed plan and what it costs; times in seconds, None where not yet known."""
        return make_report(self._tuner, self._steps)

    def stats(self) -> dict[str, Any]:
        """How training goes, for logs and monitors; see :func:`make_stats`."""
        return make_stats(self._tuner, self._steps)

    def _install(self) -> None:
        """Take the tuner's plan into use; no step is under way."""
        plan = self._tuner.plan
        self._allgather.wait_all()
        self._tracker.install(plan, self._lane.install(plan))
        self._allgather.install(plan, self._tracker.members, len(self.specs))
        self.num_installed += 1
        self._kept.clear()  # these ran by another plan
        self._transport.trim()
        self.profiling = self._tuner.phase is TuningPhase.PROFILE

    def _close(self) -> None:
        self._runtime.check()
        self._lane.events.append(CLOSE)

    def _await_result(self) -> StepResult:
        """The result of the closed step, after those of discarded steps before it."""
        while self._num_unread:
            self._runtime.await_reply(self._lane.reply, self._name)
            self._num_unread -= 1
        result: StepResult = self._runtime.await_reply(self._lane.reply, self._name)
        return result


def _make_tuner(runtime: Runtime, options: EngineOptions, specs: Sequence[TensorSpec]) -> Tuner:
    return Tuner(
        runtime.config,
        options.schedule,
        options.threshold_bytes,
        specs,
        options.decouples,
        runtime.size if options.sharded_update else 1,
        tells=runtime.rank == 0,
        name=options.name,
        wire_dtype=options.wire_dtype,
        gathers_gradients=not options.sharded_update,
    )


def _make_recorder(
    runtime: Runtime, name: str, report: Callable[[], dict[str, Any]]
) -> Recorder | None:
    """The recorder, if runs are to be recorded."""
    if not (folder := runtime.config.record_dir):
        return None
    return Recorder(
        folder, name, runtime.rank, runtime.size, runtime.library, report, runtime.warn_once
    )

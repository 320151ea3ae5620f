"""The engine: one optimizer's gradients, from ready events to averaged values.

The training thread calls :meth:`Engine.mark_ready` as gradients appear and
:meth:`Engine.synchronize` when it needs them averaged; between the two, the communication thread
sends by the installed plan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from wfbp.comm.backend import Buffer
from wfbp.core.cost import Costs
from wfbp.core.types import Op, TensorSpec
from wfbp.runtime import agreement
from wfbp.runtime.arguments import check_arguments
from wfbp.runtime.extra import reduce_extra
from wfbp.runtime.lane import CLOSE, DISCARD, PlannedLane, Step, StepResult
from wfbp.runtime.memory import keep_freed_memory
from wfbp.runtime.profile import Stamps
from wfbp.runtime.recording import Recorder
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.tuner import Tuner

_PATIENCE_STEPS = 8

Source = tuple[int, object]
"""Where a gradient lies (an address) and what keeps it alive."""


class Slot(NamedTuple):
    """Where a tensor lies after reduction: the bytes, and their address."""

    data: Buffer
    address: int


_NOWHERE = Slot(np.empty(0, np.uint8), 0)


class Engine:
    """Averages the gradients of a fixed list of tensors, step after step.

    Used by one training thread; what crosses to the communication thread goes through the lane.

    Args:
        runtime: an initialised runtime with more than one rank.
        specs: the tensors, in forward order as far as it is known; equal on every rank.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: for the ``threshold`` planner.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        passes: gradients to be accumulated per step before a tensor is ready; one whose gradient
            appears more often is waited for as often from the next step on.
        active: per tensor, whether a gradient is expected; the others join when one appears.
        fetch: returns the gradient of a tensor for which no event came, or None; called when the
            step closes.
        name: of the optimizer, for messages.

    Raises:
        ValueError: bad arguments.
        DisagreementError: other ranks passed other tensors or settings.
    """

    def __init__(
        self,
        runtime: Runtime,
        specs: Sequence[TensorSpec],
        *,
        schedule: str,
        threshold_bytes: int,
        op: Op = Op.AVERAGE,
        passes: int = 1,
        active: Sequence[bool] | None = None,
        fetch: Callable[[int], Source | None] = lambda index: None,
        name: str = "optimizer",
    ) -> None:
        check_arguments(specs, schedule, threshold_bytes, op, passes)
        self.specs = tuple(specs)
        self._runtime = runtime
        self._op = op
        self._name = name
        self._fetch = fetch
        chosen = [k for k in range(len(specs)) if active is None or active[k]] or [0]
        self._tuner = Tuner(runtime.config, schedule, threshold_bytes, [specs[k] for k in chosen])
        settings = {
            "schedule": schedule,
            "threshold_bytes": threshold_bytes,
            "op": op.value,
            "tensors with gradient": [self.specs[k].name for k in chosen],
            "plan": self._tuner.plan.digest,
        }
        payload = agreement.encode_specs(self.specs, settings)
        agreement.check_specs(name, runtime.exchange(payload, f"{name}: comparing tensors"))
        self._index = {spec: k for k, spec in enumerate(self.specs)}
        self._expected = [passes] * len(self.specs)
        self._rarer_steps = 0
        self._lane = PlannedLane(runtime.duplicate(), op, name)
        self._steps = 0
        self._number = 0
        self.profiling = False
        keep_freed_memory()
        self._install()
        runtime.add_lane(self._lane)
        self._recorder: Recorder | None = None
        if folder := runtime.config.run_dir:
            self._recorder = Recorder(folder, name, runtime.rank, runtime.size, self.report)
        self._begin(time.perf_counter())

    # During backward.

    def mark_ready(self, index: int, address: int, owner: object) -> None:
        """A tensor's gradient exists (again).

        Args:
            index: into the specs.
            address: where it lies, contiguous.
            owner: kept alive until the step is over.

        Raises:
            RuntimeError: the gradient changed after it was sent, where it cannot be sent again.
        """
        fired = self._fired[index] + 1
        self._fired[index] = fired
        expected = self._expected[index]
        if fired != expected:
            if fired > expected:
                self._grown(index, address, owner)
            return
        place = self._place[index]
        if place < 0:
            self._extra[index] = (address, owner)
            return
        step = self._step
        step.addresses[place] = address
        step.owners[place] = owner
        self._ready_s[place] = time.perf_counter()
        self._num_ready += 1
        self._events.append(place)
        group = self._group_of[place]
        left = self._left[group] - 1
        self._left[group] = left
        if left == 0 and self._overlap and self._thread.sleeping:
            self._post(self._wake)

    def mark_forward(self, index: int) -> None:
        """A tensor is used for the first time in this step's forward (while ``profiling``)."""
        place = self._place[index]
        if place >= 0 and not self._forward_s[place]:
            self._forward_s[place] = time.perf_counter()

    def mark_forward_end(self) -> None:
        """Forward has ended, as far as is known yet (while ``profiling``)."""
        self._forward_end_s = time.perf_counter()

    def slot(self, index: int) -> Slot:
        """Where a tensor lies in its fusion buffer; a gradient written there is not copied.

        Raises:
            KeyError: the plan does not carry the tensor.
        """
        place = self._place[index]
        if place < 0:
            raise KeyError(f"{self.specs[index].name} is in no group")
        return self._slots[place]

    @property
    def open(self) -> bool:
        """Whether gradients have appeared that no step has taken."""
        return any(self._fired)

    # At the step's end.

    def synchronize(self) -> list[Slot | None]:
        """Close the step and wait until every gradient is reduced.

        Returns:
            Per tensor, where its reduced gradient lies until the next step's first gradient;
            None where no rank had one.

        Raises:
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        result = self._close()
        while result.discarded:
            result = self._close_again()
        done_s = time.perf_counter()
        reduced: list[Slot | None] = [None] * len(self.specs)
        for place, here in enumerate(result.present):
            if here:
                reduced[self._members[place]] = self._slots[place]
        if self._extra or self._regrown or self._num_ready < len(self._members):
            self._learn_passes()
        stamps = Stamps(
            self._begun_s,
            self._ready_s,
            self._forward_s,
            self._forward_end_s,
            self._closed_s,
            done_s,
            sum(t.packed_s - t.start_s for t in result.times),
        )
        self._steps += 1
        self._number += 1
        planned = self._tuner.plan
        if self._recorder is not None:
            self._recorder.after_step(self._tuner, stamps, result.times)
        self._tuner.after_step(stamps)
        if result.requested or self._tuner.round_due:
            self._round(reduced)
        if self._tuner.plan is not planned:
            self._install()
        self._begin(done_s)
        return reduced

    def discard(self) -> None:
        """Forget the gradients of the open step (they were zeroed before they were used)."""
        if not self.open:
            return
        if self._overlap and self._left[0] == 0 and len(self._left) > 1:
            # Messages are on their way: see the step through, drop what it brings.
            self._extra.clear()
            self._step.discards = True
            self._close(fetch=False)
            self._number += 1
        else:
            self._events.append(DISCARD)
            self._post(self._wake)
        self._begin(time.perf_counter())

    def close(self) -> None:
        """Stop serving this engine; collective only in that every rank stops using it."""
        self._runtime.remove_lane(self._lane)
        if self._recorder is not None:
            self._recorder.write()

    def report(self) -> dict[str, Any]:
        """The installed plan and what it costs; times in seconds, None where not yet known."""
        tuner = self._tuner
        predicted = tuner.predicted if tuner.phase == "installed" else None
        measured_s = tuner.measured_s
        bound_s = predicted.lower_bound_s if predicted else None
        return {
            "schedule": tuner.plan.schedule,
            "phase": tuner.phase,
            "steps": self._steps,
            "num_groups": len(tuner.plan.groups),
            "num_tensors": len(tuner.plan.tensors),
            "total_bytes": tuner.plan.total_bytes,
            "overlap": tuner.plan.overlap,
            "kappa": tuner.costs.kappa if tuner.costs else None,
            "predicted_iteration_s": predicted.iteration_s if predicted else None,
            "measured_iteration_s": measured_s,
            "predicted_exposed_s": predicted.exposed_s if predicted else None,
            "exposed_s": tuner.exposed_s,
            "lower_bound_s": bound_s,
            "ratio_to_lower_bound": measured_s / bound_s if measured_s and bound_s else None,
            "plan_digest": tuner.plan.digest,
        }

    def _install(self) -> None:
        """Take the tuner's plan into use; no step is under way."""
        plan = self._tuner.plan
        buffers = self._lane.install(plan)
        self._members = [self._index[spec] for spec in plan.tensors]
        self._place = [-1] * len(self.specs)
        self._group_of = [0] * len(plan.tensors)
        self._slots: list[Slot] = [_NOWHERE] * len(plan.tensors)
        for place, index in enumerate(self._members):
            self._place[index] = place
        for group, members in enumerate(plan.groups):
            for position, place in enumerate(members.tensors):
                self._group_of[place] = group
                data = buffers[group].slot(position)
                address = data.__array_interface__["data"][0]
                self._slots[place] = Slot(data, address)
        self._dormant = [k for k, place in enumerate(self._place) if place < 0]
        self._sizes = [len(group.tensors) for group in plan.groups]
        self._overlap = plan.overlap
        self.profiling = self._tuner.phase == "profile"
        self._lane.cost = self._tuner.costs.all_reduce if self._tuner.costs else None

    def _begin(self, now_s: float) -> None:
        count = len(self._group_of)
        self._begun_s = now_s
        self._step = Step(self._number, [0] * count, [None] * count)
        self._lane.step = self._step
        self._fired = [0] * len(self.specs)
        self._left = list(self._sizes)
        self._ready_s = [0.0] * count
        self._forward_s = [0.0] * count
        self._forward_end_s = 0.0
        self._num_ready = 0
        self._regrown = False
        self._extra: dict[int, Source] = {}
        self._events = self._lane.events
        self._thread = self._runtime.thread
        self._post = self._runtime.post
        self._wake = self._lane.wake

    def _close(self, fetch: bool = True) -> StepResult:
        """Send what is left of the step, and wait for all of it."""
        self._runtime.check()
        self._closed_s = time.perf_counter()
        step = self._step
        if fetch and self._num_ready < len(step.addresses):
            for place, address in enumerate(step.addresses):
                if not address and (source := self._fetch(self._members[place])) is not None:
                    step.addresses[place], step.owners[place] = source
                    self._ready_s[place] = self._closed_s
        for index in self._dormant if fetch else ():
            if index not in self._extra and (source := self._fetch(index)) is not None:
                self._extra[index] = source
        step.requested = bool(self._extra) or self._tuner.wants_round
        return self._await_close()

    def _close_again(self) -> StepResult:
        """Send all of a step anew, because another rank discarded what it had sent of its own.

        That rank had gradients before ``zero_grad()`` that this rank had not, or not all.
        """
        for place, address in enumerate(self._step.addresses):
            if address and address == self._slots[place].address:
                raise RuntimeError(
                    f"rank {self._runtime.rank}: {self._name}: another rank discarded gradients "
                    "that it had sent, so this step must be sent again, but the gradient of "
                    f"{self.specs[self._members[place]].name} was reduced in its place. Call "
                    "zero_grad() with set_to_none=True"
                )
        self._number += 1
        self._step.number = self._number
        return self._await_close()

    def _await_close(self) -> StepResult:
        self._events.append(CLOSE)
        self._post(self._wake)
        result: StepResult = self._runtime.await_reply(self._lane.reply, self._name)
        return result

    def _grown(self, index: int, address: int, owner: object) -> None:
        """A gradient grew after its tensor was posted: it is sent as it is now."""
        place = self._place[index]
        self._regrown = True
        if place < 0:
            self._extra[index] = (address, owner)
            return
        self._ready_s[place] = time.perf_counter()
        group = self._group_of[place]
        waits = self._left[group] > 0 or group == len(self._left) - 1
        if waits or not self._overlap:
            # Its group cannot have left yet.
            self._step.addresses[place] = address
            self._step.owners[place] = owner
        else:
            self._check_not_sent_in_place(index, address)
            self._extra[index] = (address, owner)

    def _check_not_sent_in_place(self, index: int, address: int) -> None:
        """Raise unless a tensor that was sent too early can be sent again at the step border."""
        if self._slots[self._place[index]].address == address:
            raise RuntimeError(
                f"rank {self._runtime.rank}: {self._name}: the gradient of "
                f"{self.specs[index].name} changed while it was being sent. Pass "
                "backward_passes_per_step=N to DistributedOptimizer where N backward passes "
                "precede each step()"
            )

    def _whole(self, index: int) -> Source:
        """All of this rank's gradient of a tensor that is reduced at the step border."""
        if index in self._extra:
            return self._extra[index]
        place = self._place[index]
        if place < 0 or not self._step.addresses[place]:
            return 0, None
        # It grew on another rank only; what the message brought lacks that rank's last part.
        address = self._step.addresses[place]
        self._check_not_sent_in_place(index, address)
        return address, self._step.owners[place]

    def _learn_passes(self) -> None:
        """Expect as many backward passes per step as were seen."""
        rarer = False
        for index, fired in enumerate(self._fired):
            if fired > self._expected[index]:
                self._expected[index] = fired
            elif 0 < fired < self._expected[index]:
                rarer = True
        self._rarer_steps = self._rarer_steps + 1 if rarer else 0
        if self._rarer_steps >= _PATIENCE_STEPS:
            self._rarer_steps = 0
            self._expected = [max(1, fired) for fired in self._fired]

    def _round(self, reduced: list[Slot | None]) -> None:
        """Talk at the step border: reduce what the plan did not carry; let the tuner decide."""
        due = self._tuner.round_due
        told = due or self._tuner.phase == "installed"
        mine = {"extra": sorted(self._extra), "tuner": self._tuner.message() if told else {}}
        payloads = self._runtime.exchange(json.dumps(mine).encode(), f"{self._name}: step border")
        said = [json.loads(p) for p in payloads]
        extra = sorted({index for message in said for index in message["extra"]})
        if extra:
            specs = [self.specs[k] for k in extra]
            sources = [self._whole(k) for k in extra]
            for k, data in zip(
                extra, reduce_extra(self._runtime, specs, sources, self._op), strict=True
            ):
                reduced[k] = Slot(data, data.__array_interface__["data"][0])
        joining = [self.specs[k] for k in extra if self._place[k] < 0]
        if joining:
            self._tuner.restart([*joining, *self._tuner.plan.tensors])
        elif due or any(message["tuner"].get("drifted") for message in said):
            self._tuner.decide([m["tuner"] for m in said], self._measure_costs)
        else:
            return
        digests = self._runtime.exchange(self._tuner.plan.digest.encode(), f"{self._name}: plan")
        agreement.check_equal(self._name, "the plan", [d.decode() for d in digests])

    def _measure_costs(self) -> Costs:
        return self._runtime.measure_costs(sum(spec.nbytes for spec in self.specs))

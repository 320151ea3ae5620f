"""The exchange at the end of a step, which happens only where some rank asks for it.

A tensor that had no gradient before (frozen until now, or seldom used), or whose gradient grew
after it was sent, is reduced here, in a message of its own; and the tuner decides about plans.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from wfbp.comm.backend import Backend, Work
from wfbp.core.cost import Costs
from wfbp.core.plan import Plan, split_by_dtype
from wfbp.core.types import Op, TensorSpec
from wfbp.runtime import consistency
from wfbp.runtime.engine.tracker import GradientTracker
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import BufferView, Step
from wfbp.runtime.transport.transport import BackwardBuffer, Transport
from wfbp.runtime.tuning.profile import TuningPhase
from wfbp.runtime.tuning.tuner import Tuner


def reduce_unplanned(
    channel: ControlChannel,
    transport: Transport,
    specs: Sequence[TensorSpec],
    sources: Sequence[tuple[int, object]],
    op: Op,
) -> list[BufferView | None]:
    """Reduce tensors now, in new storage; collective.

    ``sources`` are address and owner per tensor, address 0 where this rank has no gradient. The
    lane of ``transport`` must be idle. Returns where each tensor lies; None where no rank has a
    gradient.
    """
    plan = Plan("unplanned", tuple(specs), split_by_dtype(specs, [range(len(specs))]))
    step = Step(0, [address for address, _ in sources], [owner for _, owner in sources])
    reduced: dict[int, BufferView] = {}
    transport.close(step)
    buffers = transport.backward(plan, op)
    arrivals = []
    for group, buffer in enumerate(buffers):
        send = partial(_send_unplanned, transport, buffer, step, group)
        channel.call(send, "gradients outside of the plan")
        arrivals.append(buffer.arrived(step=0))
    transport.join()
    present = {k: here for a in arrivals for k, here in zip(a.tensors, a.present, strict=True)}
    for buffer, members in zip(buffers, plan.groups, strict=True):
        for position, k in enumerate(members.tensors):
            if present[k]:
                reduced[k] = transport.view(buffer.slot(position))
    return [reduced.get(k) for k in range(len(specs))]


def _send_unplanned(
    transport: Transport, buffer: BackwardBuffer, step: Step, group: int, _: Backend
) -> Work[None]:
    transport.order_after_gradients(step, group)
    buffer.pack(step)
    return _EnqueuedWork(transport, buffer.send(transport.backend))


class _EnqueuedWork(Work[None]):
    """A work that is complete when what follows in the lane finds its result."""

    def __init__(self, transport: Transport, work: Work[None]) -> None:
        self._transport = transport
        self._work = work
        self.nbytes = work.nbytes

    @property
    def activity(self) -> int:
        return self._work.activity

    def test(self) -> bool:
        return self._transport.is_enqueued(self._work)

    @property
    def result(self) -> None:
        return None


class StepSynchronizer:
    """Reduces at the end of a step what the plan did not carry, and has the tuner decide about
    plans.

    Each engine has a channel of its own, because ranks may end the steps of several engines in
    different orders.
    """

    def __init__(
        self,
        runtime: Runtime,
        channel: ControlChannel,
        tracker: GradientTracker,
        transport: Transport,
        tuner: Tuner,
        op: Op,
        name: str,
        who: str,
    ) -> None:
        self._runtime = runtime
        self._channel = channel
        self._tracker = tracker
        self._transport = transport
        self._tuner = tuner
        self._op = op
        self._name = name
        self._who = who
        self.sparse: Sequence[int] = ()
        self.statuses: Sequence[dict[str, Any]] = ()

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Every rank's payload, at the end of a step; collective."""
        return exchange_payloads(self._channel, self._name, payload, what)

    def run(
        self,
        reduced: list[BufferView | None],
        wanted: bool,
        sparse: Collection[int],
        status: dict[str, Any],
    ) -> bool:
        """Reduce what the plan did not carry; let the tuner decide. Collective.

        Args:
            reduced: per tensor of the engine, where it lies reduced; completed here.
            wanted: whether this rank wants whole gradients.
            sparse: the tensors of which this rank has sparse gradients, which are not reduced here;
                :attr:`sparse` then has those of all ranks.
            status: what this rank tells the others, in JSON's types; :attr:`statuses` then has
                every rank's.

        Returns:
            Whether any rank wants whole gradients.
        """
        tracker, tuner = self._tracker, self._tuner
        due = tuner.round_due
        of_tuner = tuner.message() if due or tuner.phase is TuningPhase.INSTALLED else {}
        mine = {
            "unplanned": sorted(tracker.unplanned),
            "tuner": of_tuner,
            "status": status,
            "whole": wanted,
            "sparse": sorted(sparse),
        }
        payloads = exchange_payloads(
            self._channel, self._name, json.dumps(mine).encode(), "end of the step"
        )
        messages = [json.loads(p) for p in payloads]
        self.statuses = [message["status"] for message in messages]
        self.sparse = sorted({index for message in messages for index in message["sparse"]})
        unplanned = sorted({index for message in messages for index in message["unplanned"]})
        if unplanned:
            specs = [tracker.specs[k] for k in unplanned]
            sources = [tracker.unplanned_gradient(k) for k in unplanned]
            slots = reduce_unplanned(self._channel, self._transport, specs, sources, self._op)
            for k, slot in zip(unplanned, slots, strict=True):
                reduced[k] = slot
        joining = [tracker.specs[k] for k in unplanned if tracker.plan_indices[k] < 0]
        wished = any(message["tuner"].get("wants_round") for message in messages)
        if joining:
            tuner.add_tensors(joining)
        elif due or wished:
            tuner.decide([m["tuner"] for m in messages], self._measure_costs, self._share)
        if joining or due or wished:
            digests = exchange_payloads(
                self._channel, self._name, tuner.plan.digest.encode(), "plan"
            )
            consistency.check_equal(self._who, "the plan", [d.decode() for d in digests])
        return any(message["whole"] for message in messages)

    def _measure_costs(self) -> Costs:
        nbytes = sum(spec.nbytes for spec in self._tracker.specs)
        tuner = self._tuner
        with self._runtime.collective_lock.hold(
            self._channel, f"{self._name}: measuring the network"
        ):
            return self._runtime.measure_costs(
                nbytes, tuner.operations, tuner.doubts_costs, self._transport.backend, self._channel
            )

    def _share(self, compute: Callable[[], Any]) -> Any:
        """What rank 0 computes, in JSON's types; collective."""
        payload = json.dumps(compute()).encode() if self._runtime.rank == 0 else b""
        return json.loads(exchange_payloads(self._channel, self._name, payload, "planning")[0])


def exchange_payloads(channel: ControlChannel, name: str, payload: bytes, what: str) -> list[bytes]:
    """Every rank's payload; what ranks call their optimizers may differ."""
    return channel.exchange(payload, f"{name}: {what}", what)

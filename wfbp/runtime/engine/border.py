"""The round of talk at a step's border, which happens only where some rank asks for it."""

from __future__ import annotations

import json

from wfbp.core.cost import Costs
from wfbp.core.types import Op
from wfbp.runtime import agreement
from wfbp.runtime.engine.extra import reduce_unplanned
from wfbp.runtime.engine.gathering import GradientTracker
from wfbp.runtime.progress.talk import ControlChannel
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.slot import BufferView
from wfbp.runtime.transport.transport import Transport
from wfbp.runtime.tuning.tuner import Tuner


class StepSynchronizer:
    """Settles at the end of a step what its plan did not.

    Of engines that are used side by side, one rank may come to this one's border first and another
    rank to that of another engine: each talks apart.

    Args:
        runtime: of this rank.
        channel: of this engine alone.
        tracker: knows what the plan did not carry.
        transport: where gradients lie.
        tuner: decides about plans.
        op: how gradients combine.
        name: of the optimizer, for messages.
        who: rank and optimizer, for errors.
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

    def run(self, reduced: list[BufferView | None], wanted: bool) -> bool:
        """Reduce what the plan did not carry; let the tuner decide. Collective.

        Args:
            reduced: per tensor of the engine, where it lies reduced; completed here.
            wanted: whether this rank wants whole gradients.

        Returns:
            Whether any rank wants whole gradients.

        Raises:
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        tracker, tuner = self._tracker, self._tuner
        due = tuner.round_due
        told = tuner.message() if due or tuner.phase == "installed" else {}
        mine = {"extra": sorted(tracker.unplanned), "tuner": told, "whole": wanted}
        payloads = exchange_payloads(
            self._channel, self._name, json.dumps(mine).encode(), "step border"
        )
        messages = [json.loads(p) for p in payloads]
        extra = sorted({index for message in messages for index in message["extra"]})
        if extra:
            specs = [tracker.specs[k] for k in extra]
            sources = [tracker.unplanned_gradient(k) for k in extra]
            slots = reduce_unplanned(self._channel, self._transport, specs, sources, self._op)
            for k, slot in zip(extra, slots, strict=True):
                reduced[k] = slot
        joining = [tracker.specs[k] for k in extra if tracker.place[k] < 0]
        wished = any(message["tuner"].get("wants_round") for message in messages)
        if joining:
            tuner.join(joining)
        elif due or wished:
            tuner.decide([m["tuner"] for m in messages], self._measure_costs)
        if joining or due or wished:
            digests = exchange_payloads(
                self._channel, self._name, tuner.plan.digest.encode(), "plan"
            )
            agreement.check_equal(self._who, "the plan", [d.decode() for d in digests])
        return any(message["whole"] for message in messages)

    def _measure_costs(self) -> Costs:
        nbytes = sum(spec.nbytes for spec in self._tracker.specs)
        tuner = self._tuner
        with self._runtime.collective_lock.hold(
            self._channel, f"{self._name}: measuring the network"
        ):
            return self._runtime.measure_costs(
                nbytes, tuner.operations, tuner.doubts_costs, self._transport.carrier, self._channel
            )


def exchange_payloads(channel: ControlChannel, name: str, payload: bytes, what: str) -> list[bytes]:
    """Every rank's payload; what ranks call their optimizers may differ."""
    return channel.exchange(payload, f"{name}: {what}", what)

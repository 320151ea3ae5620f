"""The round of talk at a step's border, which happens only where some rank asks for it."""

from __future__ import annotations

import json

from wfbp.core.cost import Costs
from wfbp.core.types import Op
from wfbp.runtime import agreement
from wfbp.runtime.extra import reduce_extra
from wfbp.runtime.gathering import Gathering
from wfbp.runtime.medium import Medium
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.slot import Slot
from wfbp.runtime.talk import Talk
from wfbp.runtime.tuner import Tuner


class Border:
    """Settles at the end of a step what its plan did not.

    Of engines that are used side by side, one rank may come to this one's border first and another
    rank to that of another engine: each talks apart.

    Args:
        runtime: of this rank.
        talk: of this engine alone.
        gathering: knows what the plan did not carry.
        medium: where gradients lie.
        tuner: decides about plans.
        op: how gradients combine.
        name: of the optimizer, for messages.
        who: rank and optimizer, for errors.
    """

    def __init__(
        self,
        runtime: Runtime,
        talk: Talk,
        gathering: Gathering,
        medium: Medium,
        tuner: Tuner,
        op: Op,
        name: str,
        who: str,
    ) -> None:
        self._runtime = runtime
        self._talk = talk
        self._gathering = gathering
        self._medium = medium
        self._tuner = tuner
        self._op = op
        self._name = name
        self._who = who

    def talk(self, reduced: list[Slot | None], wanted: bool) -> bool:
        """Reduce what the plan did not carry; let the tuner decide. Collective.

        Args:
            reduced: per tensor of the engine, where it lies reduced; completed here.
            wanted: whether this rank wants whole gradients.

        Returns:
            Whether any rank wants whole gradients.

        Raises:
            WfbpError: ranks disagree, failed, or did not answer in time.
        """
        gathering, tuner = self._gathering, self._tuner
        due = tuner.round_due
        told = tuner.message() if due or tuner.phase == "installed" else {}
        mine = {"extra": sorted(gathering.extra), "tuner": told, "whole": wanted}
        payloads = exchange(self._talk, self._name, json.dumps(mine).encode(), "step border")
        said = [json.loads(p) for p in payloads]
        extra = sorted({index for message in said for index in message["extra"]})
        if extra:
            specs = [gathering.specs[k] for k in extra]
            sources = [gathering.whole(k) for k in extra]
            slots = reduce_extra(self._talk, self._medium, specs, sources, self._op)
            for k, slot in zip(extra, slots, strict=True):
                reduced[k] = slot
        joining = [gathering.specs[k] for k in extra if gathering.place[k] < 0]
        wished = any(message["tuner"].get("wants_round") for message in said)
        if joining:
            tuner.join(joining)
        elif due or wished:
            tuner.decide([m["tuner"] for m in said], self._measure_costs)
        if joining or due or wished:
            digests = exchange(self._talk, self._name, tuner.plan.digest.encode(), "plan")
            agreement.check_equal(self._who, "the plan", [d.decode() for d in digests])
        return any(message["whole"] for message in said)

    def _measure_costs(self) -> Costs:
        nbytes = sum(spec.nbytes for spec in self._gathering.specs)
        tuner = self._tuner
        with self._runtime.agenda.item(self._talk, f"{self._name}: measuring the network"):
            return self._runtime.measure_costs(
                nbytes, tuner.operations, tuner.doubts_costs, self._medium.carrier, self._talk
            )


def exchange(talk: Talk, name: str, payload: bytes, what: str) -> list[bytes]:
    """Every rank's payload; what ranks call their optimizers may differ."""
    return talk.exchange(payload, f"{name}: {what}", what)

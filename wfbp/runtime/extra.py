"""Reduction of tensors that a step's plan did not carry, at the step border.

A tensor that had no gradient before (frozen until now, or seldom used), or whose gradient grew
after it was sent, is reduced here, once, in a message of its own; nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from wfbp.comm.backend import Backend, Work
from wfbp.core.plan import Plan, split_by_dtype
from wfbp.core.types import Op, TensorSpec
from wfbp.runtime.medium import BackwardBuffer, Medium
from wfbp.runtime.slot import Slot
from wfbp.runtime.steps import Step
from wfbp.runtime.talk import Talk


def reduce_extra(
    talk: Talk,
    medium: Medium,
    specs: Sequence[TensorSpec],
    sources: Sequence[tuple[int, object]],
    op: Op,
) -> list[Slot | None]:
    """Reduce tensors now; collective.

    Args:
        talk: in which ranks have come to this.
        medium: where they lie; of a lane that sends nothing now.
        specs: equal on every rank.
        sources: per tensor, address and owner; address 0 where this rank has no gradient.
        op: ``Op.AVERAGE`` or ``Op.SUM``.

    Returns:
        Per tensor, where it lies reduced, in new storage; None where no rank has a gradient.
    """
    plan = Plan("extra", tuple(specs), split_by_dtype(specs, [range(len(specs))]))
    step = Step(0, [address for address, _ in sources], [owner for _, owner in sources])
    reduced: dict[int, Slot] = {}
    medium.close(step)
    buffers = medium.backward(plan, op)
    arrivals = []
    for group, buffer in enumerate(buffers):
        send = partial(_send, medium, buffer, step, group)
        talk.call(send, "gradients at the border")
        arrivals.append(buffer.arrived(step=0))
    medium.join()
    present = {k: here for a in arrivals for k, here in zip(a.tensors, a.present, strict=True)}
    for buffer, members in zip(buffers, plan.groups, strict=True):
        for position, k in enumerate(members.tensors):
            if present[k]:
                reduced[k] = medium.slot(buffer.slot(position))
    return [reduced.get(k) for k in range(len(specs))]


def _send(medium: Medium, buffer: BackwardBuffer, step: Step, group: int, _: Backend) -> Work[None]:
    medium.order(step, group)
    buffer.pack(step)
    return _Settling(medium, buffer.send(medium.carrier))


class _Settling(Work[None]):
    """A work that is complete when what follows in the lane finds its result."""

    def __init__(self, medium: Medium, work: Work[None]) -> None:
        self._medium = medium
        self._work = work
        self.nbytes = work.nbytes

    @property
    def activity(self) -> int:
        return self._work.activity

    def test(self) -> bool:
        return self._medium.settled(self._work)

    @property
    def result(self) -> None:
        return None

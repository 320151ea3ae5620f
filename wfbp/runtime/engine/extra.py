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
from wfbp.runtime.progress.talk import ControlChannel
from wfbp.runtime.slot import BufferView
from wfbp.runtime.steps import Step
from wfbp.runtime.transport.transport import BackwardBuffer, Transport


def reduce_unplanned(
    channel: ControlChannel,
    transport: Transport,
    specs: Sequence[TensorSpec],
    sources: Sequence[tuple[int, object]],
    op: Op,
) -> list[BufferView | None]:
    """Reduce tensors now; collective.

    Args:
        channel: in which ranks have come to this.
        transport: where they lie; of a lane that sends nothing now.
        specs: equal on every rank.
        sources: per tensor, address and owner; address 0 where this rank has no gradient.
        op: ``Op.AVERAGE`` or ``Op.SUM``.

    Returns:
        Per tensor, where it lies reduced, in new storage; None where no rank has a gradient.
    """
    plan = Plan("extra", tuple(specs), split_by_dtype(specs, [range(len(specs))]))
    step = Step(0, [address for address, _ in sources], [owner for _, owner in sources])
    reduced: dict[int, BufferView] = {}
    transport.close(step)
    buffers = transport.backward(plan, op)
    arrivals = []
    for group, buffer in enumerate(buffers):
        send = partial(_send_unplanned, transport, buffer, step, group)
        channel.call(send, "gradients at the border")
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
    return _EnqueuedWork(transport, buffer.send(transport.carrier))


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

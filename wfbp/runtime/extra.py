"""Reduction of tensors that a step's plan did not carry, at the step border.

A tensor that had no gradient before (frozen until now, or seldom used), or whose gradient grew
after it was sent, is reduced here, once, in a message of its own; nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from wfbp.core.plan import Plan, split_by_dtype
from wfbp.core.types import Op, TensorSpec
from wfbp.runtime.fusion import FusionBuffer
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.slot import Slot
from wfbp.runtime.steps import Step


def reduce_extra(
    runtime: Runtime,
    specs: Sequence[TensorSpec],
    sources: Sequence[tuple[int, object]],
    op: Op,
) -> list[Slot | None]:
    """Reduce tensors now; collective.

    Args:
        specs: equal on every rank.
        sources: per tensor, address and owner; address 0 where this rank has no gradient.
        op: ``Op.AVERAGE`` or ``Op.SUM``.

    Returns:
        Per tensor, where it lies reduced, in new storage; None where no rank has a gradient.
    """
    plan = Plan("extra", tuple(specs), split_by_dtype(specs, [range(len(specs))]))
    step = Step(0, [address for address, _ in sources], [owner for _, owner in sources])
    reduced: dict[int, Slot] = {}
    for group, members in enumerate(plan.groups):
        fusion = FusionBuffer(plan, group, op, runtime.size, runtime.config.direct_bytes)
        fusion.pack(step)
        runtime.call(fusion.send, "gradients at the border")
        present = fusion.arrived(step=0).present
        for position, k in enumerate(members.tensors):
            if present[position]:
                reduced[k] = Slot.of(fusion.slot(position))
    return [reduced.get(k) for k in range(len(specs))]

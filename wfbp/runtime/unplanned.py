"""Gradients outside of the plan, which are reduced at the end of a step."""

from __future__ import annotations

from collections.abc import Sequence

from wfbp.comm.backend import Backend, Work
from wfbp.comm.memory import Memory
from wfbp.core.plan import Plan, split_by_dtype
from wfbp.core.types import TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.buffers import GroupBuffer
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.step import BufferView, GradientRef, Step


def reduce_now(
    memory: Memory,
    channel: ControlChannel,
    specs: Sequence[TensorSpec],
    gradients: Sequence[GradientRef],
    options: ReducerOptions,
) -> list[BufferView | None]:
    """Reduce these tensors in new storage; None where no rank has a gradient. Collective."""
    step = Step(0, [address for address, _ in gradients], [owner for _, owner in gradients], [])
    _, dependencies = memory.close()
    plan = Plan("unplanned", tuple(specs), split_by_dtype(specs, [range(len(specs))]))
    memory.settle()
    buffers = [
        GroupBuffer(plan, group, range(len(specs)), options.op, memory, options.wire_dtype)
        for group in range(len(plan.groups))
    ]
    for buffer in buffers:

        def send(_: Backend, buffer: GroupBuffer = buffer) -> Work[None]:
            memory.order(dependencies)
            buffer.pack(step)
            memory.packed()
            return buffer.send()

        channel.call(send, "gradients outside of the plan")
        buffer.arrived()
    memory.join()
    present = buffers[-1].read_flags(step).present
    views: list[BufferView | None] = [None] * len(specs)
    for buffer, group in zip(buffers, plan.groups, strict=True):
        for position, k in enumerate(group.tensors):
            data = buffer.result(position)
            views[k] = BufferView(data, memory.address(data)) if present[k] else None
    return views

"""A communication hook, which sends the gradients of DistributedDataParallel in fewer bits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from wfbp.comm.backend import Work
from wfbp.comm.memory import Memory
from wfbp.core.plan import Group, Plan
from wfbp.core.types import Op, TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.buffers import GroupBuffer
from wfbp.runtime.coded_buffer import ErrorFeedback, MixedBuffer, make_buffer
from wfbp.runtime.step import Step
from wfbp.torch import tensors
from wfbp.torch.compression import Choice, wires_of
from wfbp.torch.distributed.group_collectives import GroupCollective, sizes
from wfbp.torch.distributed.process_group import ProcessGroup

Hook = Callable[[Any, c10d.GradBucket], Any]


def comm_hook(compression: Choice = "int8") -> Hook:
    """A hook for ``DistributedDataParallel.register_comm_hook`` over the backend ``wfbp``.

    Gradients are sent as by the argument of :func:`wfbp.torch.DistributedOptimizer`, without
    ``auto`` and without rules, since DDP tells no names; then they are averaged. The next step's
    gradients make up for rounding, unless an average is not finite. Changes of a loss scale are not
    followed. Sparse gradients stay as they are. Every model needs another hook.

    Args:
        compression: ``"fp16"``, ``"bf16"``, ``"int8"``, ``"fp8"`` or ``"int4"``.

    Returns:
        The hook. Its first argument, the state, is the process group of the model, or None for the
        default one.

    Raises:
        TypeError: in the first backward pass, if the group has another backend.
        ValueError: a bad argument; in backward, if another model uses the hook.

    Example:
        >>> import torch, torch.distributed as dist
        >>> import wfbp.torch.distributed
        >>> dist.init_process_group("wfbp", init_method="wfbp://")
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> model.register_comm_hook(None, wfbp.torch.distributed.comm_hook("int8"))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> dist.destroy_process_group()
    """
    wire, _ = wires_of(compression, [])
    options = ReducerOptions("single", 1, Op.AVERAGE, name="comm_hook", wire=wire)
    if isinstance(compression, Mapping) or len(options.choices) > 1:
        raise ValueError(f"compression is {compression!r}; a hook needs one name, without auto")
    kept = Errors()
    buckets: dict[int, Bucket] = {}

    def hook(state: Any, bucket: c10d.GradBucket) -> Any:
        group = dist.group.WORLD if state is None else state
        if not isinstance(group, ProcessGroup):
            raise TypeError(
                f"wfbp's hook was given {group!r} as the process group; it needs one of the "
                'backend wfbp: init_process_group("wfbp")'
            )
        if bucket.buffer().is_sparse:
            total = group.allreduce([bucket.buffer()], c10d.AllreduceOptions())
            return total.get_future().then(lambda done: done.value()[0] / group.size())
        known = buckets.get(bucket.index())
        if known is None or not known.is_of(group, bucket):  # DDP changes them after a step
            known = buckets[bucket.index()] = Bucket(group, bucket, compression, kept)
        return known.reduce(bucket)

    hook.__annotations__.clear()  # which PyTorch compares with types, and not with their names
    return hook


class Errors:
    """The errors of encoding of one model's gradients, and the number of each parameter."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.is_spoilt = False
        """Whether an average was not finite, so that errors mean nothing; equal on all ranks."""
        self._params: dict[int, tuple[int, torch.Tensor]] = {}
        self._is_complete = False  # after the first backward pass
        self._group: ProcessGroup | None = None
        self._feedback: ErrorFeedback | None = None

    def of(
        self, bucket: c10d.GradBucket, group: ProcessGroup
    ) -> tuple[ErrorFeedback, Sequence[int]]:
        """The errors of all parameters, and the numbers of a bucket's."""
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        for param, grad in pairs:
            if id(param) in self._params:
                continue
            if self._is_complete:
                raise ValueError(
                    "a communication hook has got a parameter that it does not know: it keeps "
                    "rounding errors of one model; call comm_hook() for each model"
                )
            number = len(self.specs)
            self._params[id(param)] = number, param
            self.specs.append(tensors.spec(f"parameter {number}", grad))
        self._is_complete |= bucket.is_last()
        if self._feedback is None:
            self._group, self._feedback = (
                group,
                ErrorFeedback(self.specs, group.rank(), group.size()),
            )
        if group is not self._group:
            raise ValueError(
                "a communication hook has got another process group than before; call comm_hook() "
                "for each model"
            )
        return self._feedback, [self._params[id(param)][0] for param in bucket.parameters()]

    def drop_spoilt(self) -> None:
        """Before a backward pass: begin anew if an average was not finite."""
        if self.is_spoilt and self._feedback is not None:
            self._feedback.scale(None, 0.0)
        self.is_spoilt = False


class Bucket:
    """The parameters of one of DDP's buckets, and the message with their gradients."""

    def __init__(
        self, group: ProcessGroup, bucket: c10d.GradBucket, compression: Choice, kept: Errors
    ) -> None:
        self._group, self._params, self._kept = group, bucket.parameters(), kept
        exchange = group.exchange
        errors, members = kept.of(bucket, group)
        named = [(kept.specs[k].name, p) for k, p in zip(members, self._params, strict=True)]
        wire, wires = wires_of(compression, named)
        options = ReducerOptions("single", 1, Op.AVERAGE, wire=wire, wires=wires)
        if not exchange.backend.encodes:
            options = options.without_codecs()
        specs = [kept.specs[k] for k in members]
        sent = [options.wire_of(spec, exchange.size, "") for spec in specs]
        self._sent_as = ", ".join(
            f"{n} by {wire or 'no codec'}" for wire, n in Counter(sent).items()
        )
        self._buffer: GroupBuffer | MixedBuffer | None = None
        self._members, self._num_params = members, len(kept.specs)
        if any(sent):
            # The last group of a plan has the flags of a step, which nothing needs here.
            end = tensors.spec("end", torch.zeros(1))
            plan = Plan(
                "single", (*specs, end), (Group((*range(len(specs)),)), Group((len(specs),)))
            )
            memory = Memory(exchange.backend)
            numbers = [*members, self._num_params]
            self._buffer = make_buffer(plan, 0, numbers, Op.AVERAGE, memory, sent, errors)

    def is_of(self, group: ProcessGroup, bucket: c10d.GradBucket) -> bool:
        """Whether it is this bucket's."""
        params = bucket.parameters()
        return (
            group is self._group
            and len(params) == len(self._params)
            and all(a is b for a, b in zip(params, self._params, strict=True))
        )

    def reduce(self, bucket: c10d.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Replace the bucket's gradients by averages; begins it, in the order of calls."""
        whole, buffer = bucket.buffer(), self._buffer
        if bucket.index() == 0:
            self._kept.drop_spoilt()
        if buffer is None:
            options = c10d.AllreduceOptions()
            options.reduceOp = c10d.ReduceOp(c10d.ReduceOp.AVG)
            work = self._group.allreduce([whole], options)
        else:
            work = self._group.begin("all_reduce of fewer bits", partial(self._describe, bucket))
        return work.get_future().then(lambda done: done.value()[0])

    def _describe(self, bucket: c10d.GradBucket, call: GroupCollective) -> None:
        whole, buffer = bucket.buffer(), self._buffer
        assert buffer is not None
        addresses = [0] * (self._num_params + 1)
        owners: list[object] = [None] * len(addresses)
        for number, grad in zip(self._members, bucket.gradients(), strict=True):
            addresses[number], owners[number] = grad.data_ptr(), grad
        step = Step(0, addresses, owners, [], targets=addresses)

        def begin(_: int) -> Work[None]:
            buffer.pack(step)
            return buffer.send()

        def deliver() -> None:
            buffer.arrived()
            buffer.deliver(step)
            self._kept.is_spoilt |= not math.isfinite(float(whole.sum()))

        call.run(f"{sizes(whole.dtype, whole.numel())}, {self._sent_as}", begin)
        call.deliveries.append(deliver)
        call.results = [whole]

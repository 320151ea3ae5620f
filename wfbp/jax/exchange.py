"""One exchange: the gradients of one set of leaves, step after step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

import jax

from wfbp.core.plan import Plan
from wfbp.core.types import Op, TensorSpec
from wfbp.errors import WfbpError
from wfbp.runtime.engine.engine import Engine
from wfbp.runtime.slot import BufferView, GradientRef

Copy = Callable[[Sequence[int], Sequence[int], Sequence[int]], None]


def _remedy() -> str:
    """Behind a message that a gradient came twice."""
    remedy = (
        ". Let one depend on the other, call jax.block_until_ready on the first, or average each "
        "by a function of its own, with another name="
    )
    if (devices := jax.local_device_count()) > 1:
        remedy += (
            f". Or the step runs on several of this process's {devices} devices: gradients of one "
            "device per process are exchanged; start a process for each"
        )
    return remedy


@dataclass(frozen=True)
class ExchangeKey:
    """What a program wants to have exchanged; what is equal here shares an engine.

    Args:
        name: for messages, and to keep exchanges of equal leaves apart.
        specs: the leaves, in the order of the tree.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: for the ``threshold`` planner.
        turn: 0, or how many equal requests come before it in the same program.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    op: Op
    schedule: str
    threshold_bytes: int
    turn: int = 0

    @cached_property
    def text(self) -> str:
        """All of it; the same in every process."""
        rows = [[s.name, list(s.shape), s.dtype] for s in self.specs]
        rest = [self.op.value, self.schedule, self.threshold_bytes, self.turn]
        return json.dumps([self.name, rows, *rest])

    @classmethod
    def parse(cls, text: str) -> ExchangeKey:
        """The request of a :attr:`text`."""
        name, rows, op, *rest = json.loads(text)
        specs = tuple(TensorSpec(n, tuple(shape), dtype) for n, shape, dtype in rows)
        return cls(name, specs, Op(op), *rest)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.name} ({self.turn + 1})" if self.turn else self.name

    @cached_property
    def key(self) -> int:
        """A number that stands for it in compiled programs, which may be kept on disk."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


class GradientExchange:
    """Collects a step's announcements, and gives them to the engine.

    Announcements come from the herald or from the training thread, waits from an XLA thread or
    from the training thread. ``lock`` is shared with all other exchanges and held for every change
    of what is known of the open step; nothing waits under it.

    Args:
        request: what is exchanged.
        where: this rank, for messages.
        lock: see above.
        make: gives the engine. Collective: called in the first wait, because only execution has an
            order that all ranks share.
        copy: copies memory: to these addresses, from those, so many bytes each.
        expect: is told, by leaf, the number of the group with which its gradient may leave before
            the wait, -1 for none; only of those need announcements be passed on at once.
    """

    def __init__(
        self,
        request: ExchangeKey,
        where: str,
        lock: Lock,
        make: Callable[[], Engine],
        copy: Copy,
        expect: Callable[[Sequence[int]], None],
    ) -> None:
        self._who = f"{where}: {request.title}"
        self._names = [spec.name for spec in request.specs]
        self._nbytes = [spec.nbytes for spec in request.specs]
        self._lock = lock
        self._make = make
        self._copy = copy
        self._engine: Engine | None = None
        self._expect = expect
        self._num_installed = 0
        self._early: list[tuple[int, int, object, float | None]] = []
        self._addresses = [0] * len(self._names)
        self._closing = False
        self._problem = ""
        self._failed = ""

    def announce(
        self, index: int, address: int, owner: object = None, time_s: float | None = None
    ) -> None:
        """A gradient exists; called with the lock held.

        Args:
            index: of the leaf.
            address: where it lies until the wait.
            owner: kept alive until the step is over.
            time_s: since when, as of ``time.perf_counter``; None for now.
        """
        if self._failed:
            return
        if self._addresses[index] or self._closing:
            self._problem = self._problem or (
                f"{self._who}: the gradient of {self._names[index]} was announced again before "
                f"the step was over: two steps run at once{_remedy()}. Or an earlier step failed "
                "before its end, as by a callback that raised: the ranks' halves of it cannot be "
                "told apart from the next step; call wfbp.jax.shutdown() and wfbp.jax.init() on "
                "every rank, and go on"
            )
            return
        self._addresses[index] = address
        self._mark(index, address, owner, time_s)

    def reduce(self, inputs: Sequence[int] | None, outputs: Sequence[int]) -> None:
        """Close the step, and wait until all reduced gradients lie where they are wanted.

        Args:
            inputs: where the gradients lie now; None for where they were announced.
            outputs: where they are wanted, reduced; may be the same.

        Raises:
            WfbpError: two steps ran at once; or ranks disagree, failed, or did not answer in time.
                Every later call then raises it too.
        """
        with self._lock:
            if self._closing:
                self._problem = self._problem or f"{self._who}: two steps end at once{_remedy()}"
            self._failed = self._failed or self._problem
            if self._failed:
                raise WfbpError(self._failed)
            self._closing = True
        try:
            if inputs is not None:
                self._follow(inputs)
            slots = self._synchronize(outputs)
            rest = [
                (to, s.address, n)
                for to, s, n in zip(outputs, slots, self._nbytes, strict=True)
                if s
            ]
            if rest:
                self._copy(*zip(*rest, strict=True))
            with self._lock:
                if self._problem:
                    raise WfbpError(self._problem)
                self._addresses = [0] * len(self._names)
                self._closing = False
        except BaseException as error:
            self._failed = str(error)
            raise

    def _follow(self, inputs: Sequence[int]) -> None:
        """Have gradients sent (again) that lie elsewhere than they were announced, if they were.

        XLA may copy a gradient behind its announcement, and use that place for something else; or,
        where it does not change from one turn of a loop to the next, announce it once for all.
        """
        for index, address in enumerate(inputs):
            if self._addresses[index] != address:
                self._addresses[index] = address
                self._mark(index, address, None)

    def _mark(self, index: int, address: int, owner: object, time_s: float | None = None) -> None:
        if self._engine is None:
            self._early.append((index, address, owner, time_s))
        else:
            self._engine.mark_ready(index, address, owner, time_s)

    def source(self, index: int) -> GradientRef | None:
        """Where a gradient lies of which the engine expected to hear once more."""
        address = self._addresses[index]
        return (address, None) if address else None

    def report(self) -> dict[str, Any]:
        """The plan in use and what it costs; empty before the first step."""
        return {} if self._engine is None else self._engine.report()

    def close(self) -> None:
        """Never exchange again."""
        if self._engine is not None:
            self._engine.close()

    def _synchronize(self, targets: Sequence[int]) -> list[BufferView | None]:
        engine = self._engine
        if engine is None:
            engine = self._make()
            for index, address, owner, time_s in self._early:
                engine.mark_ready(index, address, owner, time_s)
            self._early.clear()
            self._engine = engine
        slots = engine.synchronize(targets=targets)
        if engine.num_installed != self._num_installed:
            self._num_installed = engine.num_installed
            self._expect(early_groups(engine.plan, engine.specs))
        return slots


def early_groups(plan: Plan, specs: Sequence[TensorSpec]) -> list[int]:
    """The group with which each of some tensors may leave before the step is closed, or -1.

    Example:
        >>> from wfbp.core.plan import Group
        >>> specs = tuple(TensorSpec(name, (4,), "float32") for name in "abc")
        >>> plan = Plan("wfbp", specs, (Group((2,)), Group((1,)), Group((0,))))
        >>> early_groups(plan, specs)
        [-1, 1, 0]
    """
    groups = dict.fromkeys(specs, -1)
    if plan.overlap:
        for number, group in enumerate(plan.groups[: plan.num_backward - 1]):
            groups |= dict.fromkeys((plan.tensors[k] for k in group.tensors), number)
    return list(groups.values())

"""All exchanges of gradients of this process, and how ranks come to make the same ones.

Equal :class:`ExchangeDescription` s share a :class:`GradientExchange`, which gives a step's
announcements to its engine. The registry passes on the announcements of XLA's
threads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from time import perf_counter
from typing import Any

import jax

from wfbp.config import Config
from wfbp.core.plan import Plan
from wfbp.core.types import Op, TensorSpec
from wfbp.errors import WfbpError
from wfbp.jax import native
from wfbp.jax.device import XlaStreams, check_device, programs_device
from wfbp.jax.trees import Layout
from wfbp.runtime import consistency, process, signals
from wfbp.runtime.arguments import EngineOptions
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.step import BufferView, GradientRef

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
class ExchangeDescription:
    """The description of an exchange; equal ones share an engine.

    Args:
        name: for messages, and to distinguish exchanges of equal leaves.
        specs: the leaves, in the order of the tree.
        op: ``Op.AVERAGE`` or ``Op.SUM``.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: for the ``threshold`` planner.
        occurrence: 0, or how many equal exchanges come before it in the same program.
    """

    name: str
    specs: tuple[TensorSpec, ...]
    op: Op
    schedule: str
    threshold_bytes: int
    occurrence: int = 0

    @cached_property
    def text(self) -> str:
        """All of it; the same in every process."""
        rows = [[s.name, list(s.shape), s.dtype] for s in self.specs]
        rest = [self.op.value, self.schedule, self.threshold_bytes, self.occurrence]
        return json.dumps([self.name, rows, *rest])

    @classmethod
    def parse(cls, text: str) -> ExchangeDescription:
        """The description of a :attr:`text`."""
        name, rows, op, *rest = json.loads(text)
        specs = tuple(TensorSpec(n, tuple(shape), dtype) for n, shape, dtype in rows)
        return cls(name, specs, Op(op), *rest)

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{self.name} ({self.occurrence + 1})" if self.occurrence else self.name

    @property
    def options(self) -> EngineOptions:
        """Of the engine that serves it."""
        return EngineOptions(self.schedule, self.threshold_bytes, self.op, name=self.title)

    @cached_property
    def key(self) -> int:
        """A number for compiled programs, which may be kept on disk."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


class GradientExchange:
    """Collects a step's announcements, and gives them to the engine.

    Announcements come from the announcement thread or from the training thread, waits from an XLA
    thread or from the training thread. ``lock`` is shared with all other exchanges and held for
    every change of the open step's state; nothing waits under it.

    Args:
        description: what is exchanged.
        where: this rank, for messages.
        lock: see above.
        make: makes the engine. Collective: called in the first wait, because only execution has an
            order that all ranks share.
        copy: copies memory, given target addresses, source addresses and sizes in bytes.
        expect: gets, by leaf, the number of the group with which its gradient may leave before the
            wait, -1 for none; only these announcements must be passed on at once.
    """

    def __init__(
        self,
        description: ExchangeDescription,
        where: str,
        lock: Lock,
        make: Callable[[], Reducer],
        copy: Copy,
        expect: Callable[[Sequence[int]], None],
    ) -> None:
        self._who = f"{where}: {description.title}"
        self._names = [spec.name for spec in description.specs]
        self._nbytes = [spec.nbytes for spec in description.specs]
        self._lock = lock
        self._make = make
        self._copy = copy
        self._engine: Reducer | None = None
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
        """Close the step, and wait until all reduced gradients lie in ``outputs``.

        ``inputs`` is where the gradients lie now, None for where they were announced; may be
        ``outputs``.

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
        """Send gradients (again) that no longer lie where they were announced.

        XLA may copy a gradient behind its announcement, and reuse its memory; or announce a
        gradient that is constant in a loop only once.
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

    def stats(self) -> dict[str, Any]:
        """How training goes; empty before the first step."""
        return {} if self._engine is None else self._engine.stats()

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
    """Per tensor the group with which it may leave before the step is closed, or -1.

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


_MAKING = "jax: making an exchange"


class ExchangeRegistry:
    """Exchanges by key.

    Programs are compiled in any order, and perhaps on one rank only; a description is known from
    then on. Its engine is made when the first step of it ends. Ranks then tell each other which
    exchange they have come to: where independent steps of one program run at once, that may differ.
    All that are wanted anywhere are made, in the order of their keys.

    Any thread may call anything. ``_lock`` protects the tables and the open steps; ``_making`` is
    held while an engine is made, and waits for other ranks.

    ``device`` is the one that programs run on; None for the CPU.
    """

    def __init__(self, handlers: native.Handlers, device: XlaStreams | None = None) -> None:
        self._native = handlers
        self.device = device
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._descriptions: dict[int, ExchangeDescription] = {}
        self._exchanges: dict[int, GradientExchange] = {}
        self._engines: dict[int, Reducer] = {}
        self._runtime: Runtime | None = None
        handlers.serve(self._wait)
        threading.Thread(
            target=self._forward_announcements, name="wfbp-announce", daemon=True
        ).start()

    def add(self, description: ExchangeDescription) -> int:
        """Know a description; its key."""
        if process.is_initialized():
            # XLA may run the program on a thread that has not communicated before.
            process.current("an exchange").expect_other_threads()
        with self._lock:
            known = description.key in self._descriptions
            self._descriptions[description.key] = description
            num_known = len(self._descriptions)
        if not known and num_known > 1:
            native.wait_on_own_threads()
        if not known:
            self._stock(2 * len(description.specs))
        return description.key

    def announce(self, key: int, index: int, address: int, owner: object) -> None:
        """A gradient exists outside of a compiled program."""
        with self._lock:
            self._get(key).announce(index, address, owner)

    def reduce(self, key: int, outputs: Sequence[int]) -> None:
        """Wait for gradients outside of a compiled program; see :meth:`GradientExchange.reduce`."""
        with self._lock:
            exchange = self._get(key)
        with signals.deferred:
            exchange.reduce(None, outputs)

    def report(self) -> dict[str, dict[str, Any]]:
        """Of each exchange that has run, by name, the plan in use and what it costs."""
        return self._ask_each(GradientExchange.report)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Of each exchange that has run, by name, how training goes."""
        return self._ask_each(GradientExchange.stats)

    def _ask_each(
        self, ask: Callable[[GradientExchange], dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        with self._lock:
            exchanges = [(self._descriptions[key].title, e) for key, e in self._exchanges.items()]
        answers: dict[str, dict[str, Any]] = {}
        counts: Counter[str] = Counter()
        for name, exchange in exchanges:
            if answer := ask(exchange):
                counts[name] += 1
                number = counts[name]
                answers[name if number == 1 else f"{name} [{number}]"] = answer
        return answers

    def _wait(
        self,
        key: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        place: tuple[int, int, int] | None,
    ) -> None:
        """All gradients of a compiled program exist; called on one of XLA's threads.

        On a device they exist at ``place`` in its stream, and results are ordered before later work
        there.
        """
        with self._lock:
            self._take_notes()
            exchange = self._get(key)
        check_device(self.device, place)
        with signals.deferred, self._at(place):
            exchange.reduce(inputs, outputs)

    def _forward_announcements(self) -> None:
        """The announcement thread: passes on what XLA announces, where it may leave at once."""
        while self._native.listen():
            with self._lock:
                self._take_notes()

    def _take_notes(self) -> None:
        used = 0
        notes = self._native.take()
        now = perf_counter()
        for key, index, address, place, age_s in notes:
            used += place is not None and place[2] != 0
            try:
                check_device(self.device, place)
                with self._at(place):
                    time_s = now - age_s if place is None else None
                    self._get(key).announce(index, address, time_s=time_s)
            except WfbpError:
                continue  # no runtime, or another device; the wait that follows says so
        if used:
            self._stock(used)

    def _at(self, place: tuple[int, int, int] | None) -> AbstractContextManager[None]:
        """Within it, this thread is where a handler was called."""
        if self.device is None or place is None:
            return nullcontext()
        _, stream, handle = place
        return self.device.at(stream, self.device.recorded(handle) if handle else None)

    def _stock(self, count: int) -> None:
        """Let so many more announcements record events."""
        if self.device is not None:
            self._native.stock(self.device.recorder, self.device.lend(count))

    def _get(self, key: int) -> GradientExchange:
        """The exchange of a key, in the runtime that there is now."""
        runtime = process.current("a step that was compiled before")
        if runtime is not self._runtime:
            for exchange in self._exchanges.values():
                exchange.close()
            self._exchanges.clear()
            self._engines.clear()
            self._runtime = runtime
            runtime.expect_other_threads()  # the program may have been traced before init()
        known = self._exchanges.get(key)
        if known is None:
            description = self._descriptions.get(key)
            if description is None:
                raise WfbpError(
                    f"{runtime.where}: a compiled program exchanges gradients that were not "
                    "traced in this process; wfbp's programs cannot be exported"
                )
            known = self._exchanges[key] = GradientExchange(
                description,
                runtime.where,
                self._lock,
                functools.partial(self._make, runtime, description),
                self._native.copy if self.device is None else self.device.move,
                functools.partial(self._native.expect, key),
            )
        return known

    def _make(self, runtime: Runtime, wanted: ExchangeDescription) -> Reducer:
        """The engine of an exchange; made together with all others that ranks have come to."""
        with self._making:
            if wanted.key in self._engines:
                return self._engines[wanted.key]
            with self._lock:
                known = sorted(self._descriptions)
            message = json.dumps({"wanted": wanted.text, "known": known}).encode()
            replies = [json.loads(p) for p in runtime.planning_channel.exchange(message, _MAKING)]
            descriptions = [ExchangeDescription.parse(s["wanted"]) for s in replies]
            everywhere = set.intersection(*(set(s["known"]) for s in replies))
            if not everywhere.issuperset(d.key for d in descriptions):
                _disagree(runtime.where, descriptions)
            for _, description in sorted({d.key: d for d in descriptions}.items()):
                if description.key not in self._engines:
                    self._engines[description.key] = self._engine(runtime, description)
            return self._engines[wanted.key]

    def _engine(self, runtime: Runtime, description: ExchangeDescription) -> Reducer:
        with self._lock:
            exchange = self._get(description.key)
        return Reducer(
            runtime,
            description.specs,
            description.options,
            device=self.device,
            fetch=exchange.source,
            channel=runtime.planning_channel,
        )


@functools.cache
def exchange_registry() -> ExchangeRegistry:
    """The registry of this process.

    Raises ``ImportError`` without XLA handlers, ``WfbpError`` where programs run on neither a CPU
    nor CUDA.
    """
    device = programs_device()
    return ExchangeRegistry(native.load(), device)


def _disagree(where: str, descriptions: Sequence[ExchangeDescription]) -> None:
    """Raise ``DisagreementError`` with the difference between the ranks' exchanges."""
    settings = [
        {"name": r.title, "op": str(r.op), "schedule": r.schedule, "bytes": r.threshold_bytes}
        for r in descriptions
    ]
    encoded = [
        consistency.encode_specs(r.specs, s) for r, s in zip(descriptions, settings, strict=True)
    ]
    consistency.check_specs(f"{where}: {descriptions[0].title}", encoded)


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """How gradients are to be exchanged; None stands for the environment's setting.

    Args:
        user: the function that was called, for messages.
        op: ``Average`` or ``Sum``.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: group size of ``threshold``.
        name: given by the caller, or None.
    """

    user: str
    op: Op
    schedule: str | None
    threshold_bytes: int | None
    name: str | None

    def check(self, config: Config) -> None:
        """Raise ``ValueError`` for an argument that is bad whatever the leaves are."""
        some = TensorSpec("any", (1,), "float32")
        EngineOptions(*self._plan(config), self.op).check([some], self.user)

    def describe(self, runtime: Runtime, layout: Layout) -> ExchangeDescription:
        """The exchange of a tree's leaves; ``ValueError`` for a bad argument."""
        schedule, limit_bytes = self._plan(runtime.config)
        EngineOptions(schedule, limit_bytes, self.op).check(layout.specs, self.user)
        return ExchangeDescription(
            self.name or self.user, layout.specs, self.op, schedule, limit_bytes
        )

    def _plan(self, config: Config) -> tuple[str, int]:
        return (
            config.schedule if self.schedule is None else self.schedule,
            config.threshold_bytes if self.threshold_bytes is None else self.threshold_bytes,
        )


def report() -> dict[str, dict[str, Any]]:
    """Of everything that exchanges gradients, by its name, the plan in use and what it costs.

    Names are those given by ``name=``, else ``value_and_grad`` or ``DistributedOptimizer``. Empty
    on one rank, and before the first step.

    Returns:
        Reports with the keys of PyTorch's ``optimizer.report()``: schedule, num_groups,
        measured_iteration_s and so on.

    Example:
        >>> import wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.report() if wfbp.size() == 1 else {}
        {}
    """
    if process.current("report()").size == 1:
        return {}
    return exchange_registry().report()


def stats() -> dict[str, dict[str, Any]]:
    """Of everything that exchanges gradients, by its name, how training goes.

    Names as of :func:`report`. Empty on one rank, and before the first step.

    Returns:
        Stats with the keys of PyTorch's ``optimizer.stats()``: iteration, iteration_s, exposed_s,
        bytes, ratio_to_lower_bound, predicted_s, plan and phase.

    Example:
        >>> import wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.stats() if wfbp.size() == 1 else {}
        {}
    """
    if process.current("stats()").size == 1:
        return {}
    return exchange_registry().stats()

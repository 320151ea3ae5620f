"""All exchanges of gradients of this process.

Equal :class:`ExchangeDescription` s share a :class:`GradientExchange`, which gives a step's
announcements to its reducer. The registry passes on announcements from XLA's threads.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from time import perf_counter
from typing import Any

import jax

from wfbp.core.encoding import encode
from wfbp.core.ranks import Sections
from wfbp.core.types import TensorSpec
from wfbp.errors import WfbpError
from wfbp.jax import xla_handlers
from wfbp.jax.xla_device import Copy, HandlerPlace, Programs, find_programs
from wfbp.runtime import process, signals
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.consistency import SAME_TENSORS, describe_specs
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import JobRuntime
from wfbp.runtime.step import GradientRef


@dataclass(frozen=True, eq=False)
class ExchangeDescription:
    """The leaves and settings of an exchange at one place in a program, compared by identity.

    Exchanges of equal ``key`` share a reducer.
    """

    specs: tuple[TensorSpec, ...]
    options: ReducerOptions
    occurrence: int = 0

    @property
    def title(self) -> str:
        name = self.options.name
        return f"{name} ({self.occurrence + 1})" if self.occurrence else name

    @cached_property
    def compared(self) -> Sections:
        """Values that must be equal on all ranks; the same in every process."""
        settings = {
            "name": self.title,
            "op": str(self.options.op),
            "schedule": self.options.schedule,
            "bytes": self.options.threshold_bytes,
            "compression": self.options.wire,
            "exceptions from compression": self.options.wires,
        }
        return describe_specs(self.specs), settings

    @cached_property
    def key(self) -> int:
        """A number for compiled programs, which may be kept on disk."""
        digest = hashlib.sha256(encode(self.compared)).digest()
        return int.from_bytes(digest[:8], "little") >> 1


class GradientExchange:
    """Collects a step's announcements, and gives them to the reducer.

    The announcement thread or the training thread announces; an XLA thread or the training thread
    waits. All exchanges share ``lock``, held for every change of the open step's state; nothing
    waits under it. ``make`` (collective) makes the reducer; ``copy`` copies memory (targets,
    sources, bytes). ``expect`` gets each leaf's group that may leave before the wait, or -1.
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
        self.title = description.title
        self.reducer: Reducer | None = None  # before the first step
        self._who = f"{where}: {description.title}"
        self._specs = description.specs
        self._lock = lock
        self._make = make
        self._copy = copy
        self._expect = expect
        self._num_installed = 0
        self._addresses = [0] * len(self._specs)
        self._closing = False
        self._failed = ""  # why this step and all later ones raise

    def announce(self, index: int, address: int, time_s: float | None = None) -> None:
        """A gradient exists since ``perf_counter`` ``time_s``, or now; the lock is held."""
        if self._failed:
            return
        if self._addresses[index] or self._closing:
            self._failed = (
                f"{self._who}: the gradient of {self._specs[index].name} was announced again "
                f"before the step was over: two steps run at once{_remedy()}. Or an earlier step "
                "failed before its end, as by a callback that raised: the ranks' halves of it "
                "cannot be told apart from the next step; call wfbp.jax.shutdown() and "
                "wfbp.jax.init() on every rank, and go on"
            )
            return
        self._mark(index, address, time_s)

    def reduce(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Close the step, and wait until ``outputs`` (may be ``inputs``) has all reduced gradients.

        Raises ``WfbpError``, in every later call too, if steps overlap or communication fails.
        """
        with self._lock:
            if self._closing:
                self._failed = self._failed or f"{self._who}: two steps end at once{_remedy()}"
            if self._failed:
                raise WfbpError(self._failed)
            self._closing = True
        try:
            if self.reducer is None:
                # In the first wait, because only execution has an order that all ranks share.
                self.reducer = self._make()
                self._addresses = [0] * len(self._specs)
            reducer = self.reducer
            # XLA may copy a gradient after its announcement and reuse its memory, or announce a
            # gradient that is constant in a loop only once: it is sent (again) from here. Outside
            # of programs, and before there is a reducer, nothing was announced to it.
            for index, address in enumerate(inputs):
                if self._addresses[index] != address:
                    self._mark(index, address, None)
            slots = reducer.synchronize(targets=outputs)
            if reducer.num_installed != self._num_installed:
                self._num_installed = reducer.num_installed
                self._expect(reducer.early_groups)
            rest = [
                (to, slot.address, spec.nbytes)
                for to, slot, spec in zip(outputs, slots, self._specs, strict=True)
                if slot
            ]
            if rest:
                self._copy(*zip(*rest, strict=True))
            with self._lock:
                if self._failed:
                    raise WfbpError(self._failed)
                self._addresses = [0] * len(self._specs)
                self._closing = False
        except BaseException as error:
            self._failed = str(error)
            raise

    def _mark(self, index: int, address: int, time_s: float | None) -> None:
        self._addresses[index] = address
        if self.reducer is not None:
            self.reducer.mark_ready(index, address, None, time_s)

    def source(self, index: int) -> GradientRef | None:
        """The address of a gradient whose expected next announcement did not come."""
        address = self._addresses[index]
        return (address, None) if address else None


def _remedy() -> str:
    """The end of a message that a gradient was announced twice."""
    remedy = (
        ". Let one depend on the other, call jax.block_until_ready on the first, or average each "
        "by a separate function, with another name="
    )
    if (devices := jax.local_device_count()) > 1:
        remedy += (
            f". Or the step runs on several of this process's {devices} devices: gradients of one "
            "device per process are exchanged; start a process for each"
        )
    return remedy


class ExchangeRegistry:
    """Exchanges by key, of the programs that run at one location.

    Ranks compile programs in any order, and independent steps may reach their first waits in a
    different order on each rank. So ranks tell each other in the first wait which exchange they
    have reached, and all make every wanted reducer, in the order of keys.

    Any thread may call any method. ``_lock`` protects the tables and the open steps; ``_making`` is
    held while a reducer is made, which waits for other ranks.
    """

    def __init__(self, handlers: Any, programs: Programs) -> None:
        self._native = handlers
        self.programs = programs
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._descriptions: dict[int, ExchangeDescription] = {}
        self._exchanges: dict[int, GradientExchange] = {}
        self._reducers: dict[int, Reducer] = {}
        self._runtime: JobRuntime | None = None
        handlers.serve(self._wait)
        threading.Thread(
            target=self._forward_announcements, name="wfbp-announce", daemon=True
        ).start()

    def add(self, description: ExchangeDescription) -> int:
        """Register a description; returns its key."""
        if process.is_initialized():
            # XLA may run the program on a thread that has not communicated before.
            process.current("an exchange").expect_other_threads()
        with self._lock:
            known = description.key in self._descriptions
            self._descriptions[description.key] = description
        if not known:
            self.programs.stock(2 * len(description.specs))
        return description.key

    def reduce(self, key: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Reduce gradients outside of a compiled program; see :meth:`GradientExchange.reduce`."""
        with self._lock:
            exchange = self._get(key)
        with signals.deferred:
            exchange.reduce(inputs, outputs)

    def reports(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            exchanges = list(self._exchanges.values())
        found: dict[str, dict[str, Any]] = {}
        for exchange in exchanges:
            if exchange.reducer is not None:
                name, number = exchange.title, 1
                while name in found:
                    number += 1
                    name = f"{exchange.title} [{number}]"
                found[name] = exchange.reducer.report()
        return found

    def _wait(
        self, key: int, inputs: Sequence[int], outputs: Sequence[int], place: HandlerPlace
    ) -> None:
        """Reduce a program's gradients, which exist at ``place``; called on an XLA thread."""
        with self._lock:
            self._take_notes()
            exchange = self._get(key)
        self.programs.check(place)
        # On a device, results are ordered before later work in the stream of this place.
        with signals.deferred, self.programs.at(place):
            exchange.reduce(inputs, outputs)

    def _forward_announcements(self) -> None:
        """The announcement thread: passes on announcements of groups that may be sent at once."""
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
                self.programs.check(place)
                with self.programs.at(place):
                    time_s = now - age_s if place is None else None
                    self._get(key).announce(index, address, time_s=time_s)
            except WfbpError:
                continue  # no runtime, or another device; the wait that follows raises it
        if used:
            self.programs.stock(used)

    def _get(self, key: int) -> GradientExchange:
        """The exchange of a key, in the current runtime."""
        runtime = process.current("a step that was compiled before")
        if runtime is not self._runtime:
            for reducer in self._reducers.values():
                reducer.close()
            self._exchanges.clear()
            self._reducers.clear()
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
                self.programs.copy,
                functools.partial(self._native.expect, key),
            )
        return known

    def _make(self, runtime: JobRuntime, wanted: ExchangeDescription) -> Reducer:
        """Make the reducer of an exchange, with all others that ranks have reached."""
        with self._making:
            if wanted.key in self._reducers:
                return self._reducers[wanted.key]
            with self._lock:
                known = sorted(self._descriptions)
            channel, label = runtime.planning_channel, "jax: making an exchange"
            keys, known_by_rank = zip(
                *channel.exchange_values([wanted.key, known], label), strict=True
            )
            if not set(keys).issubset(set.intersection(*map(set, known_by_rank))):
                channel.exchange(b"", wanted.title, label, wanted.compared, SAME_TENSORS)
            for key in sorted(set(keys) - self._reducers.keys()):
                with self._lock:
                    description = self._descriptions[key]
                    exchange = self._get(key)
                self._reducers[key] = Reducer(
                    runtime,
                    description.specs,
                    replace(description.options, name=description.title),
                    location=self.programs.location,
                    fetch=exchange.source,
                    channel=runtime.planning_channel,
                )
            return self._reducers[wanted.key]


@functools.cache
def exchange_registry() -> ExchangeRegistry:
    """The process's registry; raises errors of :func:`find_programs` and ``xla_handlers.load``."""
    handlers = xla_handlers.load()
    return ExchangeRegistry(handlers, find_programs(handlers))


def report() -> dict[str, dict[str, Any]]:
    """Report the plan in use and how training goes, for every exchange by name.

    Names are those given by ``name=``, else ``value_and_grad`` or ``DistributedOptimizer``.

    Returns:
        Reports with the keys of PyTorch's ``optimizer.report()``, such as ``schedule``,
        ``num_groups`` and ``measured_iteration_s``. Empty on one rank, and before the first step.

    Example:
        >>> import wfbp.jax as wfbp
        >>> wfbp.init()
        >>> wfbp.report() if wfbp.size() == 1 else {}
        {}
    """
    alone = process.current("report()").size == 1
    return {} if alone else exchange_registry().reports()

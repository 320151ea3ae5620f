"""All exchanges of this process, and how ranks come to make the same ones."""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

from wfbp.errors import WfbpError
from wfbp.jax import native
from wfbp.jax.device import XlaStreams, check_device, programs_device
from wfbp.jax.exchange import ExchangeKey, GradientExchange
from wfbp.runtime import agreement, world
from wfbp.runtime.engine.engine import Engine
from wfbp.runtime.runtime import Runtime

_MAKING = "jax: making an exchange"


class ExchangeRegistry:
    """Exchanges by key.

    Programs are compiled in any order, and perhaps on one rank only; a request is known from
    then on. Its engine is made when the first step of it ends. Ranks then tell each other which
    exchange they have come to: where independent steps of one program run at once, that may not
    be the same one everywhere. All that are wanted anywhere are made, in the order of their keys.

    Any thread may call anything. ``_lock`` protects the tables and the open steps; ``_making`` is
    held while an engine is made, and waits for other ranks.

    Args:
        handlers: the XLA handlers that announce.
        device: that programs run on; None for the CPU.
    """

    def __init__(self, handlers: native.Handlers, device: XlaStreams | None = None) -> None:
        self._native = handlers
        self.device = device
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._requests: dict[int, ExchangeKey] = {}
        self._exchanges: dict[int, GradientExchange] = {}
        self._engines: dict[int, Engine] = {}
        self._runtime: Runtime | None = None
        handlers.serve(self._wait)
        threading.Thread(
            target=self._forward_announcements, name="wfbp-herald", daemon=True
        ).start()

    def add(self, request: ExchangeKey) -> int:
        """Know a request; its key."""
        if world.is_initialized():
            # XLA may run the program on a thread that has not communicated before.
            world.current("an exchange").expect_other_threads()
        with self._lock:
            known = request.key in self._requests
            self._requests[request.key] = request
            num_known = len(self._requests)
        if not known and num_known > 1:
            native.wait_on_own_threads()
        if not known:
            self._stock(2 * len(request.specs))
        return request.key

    def announce(self, key: int, index: int, address: int, owner: object) -> None:
        """A gradient exists outside of a compiled program."""
        with self._lock:
            self._get(key).announce(index, address, owner)

    def reduce(self, key: int, outputs: Sequence[int]) -> None:
        """Wait for gradients outside of a compiled program; see :meth:`Exchange.reduce`."""
        with self._lock:
            exchange = self._get(key)
        exchange.reduce(None, outputs)

    def report(self) -> dict[str, dict[str, Any]]:
        """Of each exchange that has run, by name, the plan in use and what it costs."""
        with self._lock:
            found = [(self._requests[key].title, e) for key, e in self._exchanges.items()]
        reports: dict[str, dict[str, Any]] = {}
        turns: Counter[str] = Counter()
        for name, exchange in found:
            if report := exchange.report():
                turns[name] += 1
                turn = turns[name]
                reports[name if turn == 1 else f"{name} [{turn}]"] = report
        return reports

    def _wait(
        self,
        key: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        place: tuple[int, int, int] | None,
    ) -> None:
        """All gradients of a compiled program exist; called on one of XLA's threads.

        On a device they will, where the stream of ``place`` has come to; and what is reduced lies
        in its place for what follows there.
        """
        with self._lock:
            self._take_notes()
            exchange = self._get(key)
        check_device(self.device, place)
        with self._at(place):
            exchange.reduce(inputs, outputs)

    def _forward_announcements(self) -> None:
        """The herald: passes on what XLA's threads announce, where it may leave at once."""
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
        runtime = world.current("a step that was compiled before")
        if runtime is not self._runtime:
            for exchange in self._exchanges.values():
                exchange.close()
            self._exchanges.clear()
            self._engines.clear()
            self._runtime = runtime
            runtime.expect_other_threads()  # the program may have been traced before init()
        known = self._exchanges.get(key)
        if known is None:
            request = self._requests.get(key)
            if request is None:
                raise WfbpError(
                    f"{runtime.where}: a compiled program exchanges gradients that were not "
                    "traced in this process; wfbp's programs cannot be exported"
                )
            known = self._exchanges[key] = GradientExchange(
                request,
                runtime.where,
                self._lock,
                functools.partial(self._make, runtime, request),
                self._native.copy if self.device is None else self.device.move,
                functools.partial(self._native.expect, key),
            )
        return known

    def _make(self, runtime: Runtime, wanted: ExchangeKey) -> Engine:
        """The engine of a request; made together with all that other ranks have come to."""
        with self._making:
            if wanted.key in self._engines:
                return self._engines[wanted.key]
            with self._lock:
                known = sorted(self._requests)
            message = json.dumps({"wanted": wanted.text, "known": known}).encode()
            replies = [json.loads(p) for p in runtime.planning_channel.exchange(message, _MAKING)]
            requests = [ExchangeKey.parse(s["wanted"]) for s in replies]
            everywhere = set.intersection(*(set(s["known"]) for s in replies))
            if not everywhere.issuperset(r.key for r in requests):
                _disagree(runtime.where, requests)
            for _, request in sorted({r.key: r for r in requests}.items()):
                if request.key not in self._engines:
                    self._engines[request.key] = self._engine(runtime, request)
            return self._engines[wanted.key]

    def _engine(self, runtime: Runtime, request: ExchangeKey) -> Engine:
        with self._lock:
            exchange = self._get(request.key)
        return Engine(
            runtime,
            request.specs,
            schedule=request.schedule,
            threshold_bytes=request.threshold_bytes,
            op=request.op,
            device=self.device,
            fetch=exchange.source,
            name=request.title,
            channel=runtime.planning_channel,
        )


@functools.cache
def exchange_registry() -> ExchangeRegistry:
    """Those of this process.

    Raises:
        ImportError: there are no XLA handlers, and they cannot be compiled.
        NotImplementedError: programs run on neither a CPU nor CUDA.
    """
    device = programs_device()
    return ExchangeRegistry(native.load(), device)


def _disagree(where: str, requests: Sequence[ExchangeKey]) -> None:
    """Raise what ranks disagree upon.

    Raises:
        DisagreementError: on every rank.
    """
    settings = [
        {"name": r.title, "op": str(r.op), "schedule": r.schedule, "bytes": r.threshold_bytes}
        for r in requests
    ]
    encoded = [agreement.encode_specs(r.specs, s) for r, s in zip(requests, settings, strict=True)]
    agreement.check_specs(f"{where}: {requests[0].title}", encoded)

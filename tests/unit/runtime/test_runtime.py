"""The runtime: collectives, costs, leaving, and how a failing rank tells the others."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import wfbp
from tests.support.local import LocalBackend, LocalWorld
from tests.support.ranks import all_well, run_ranks
from wfbp.config import Config
from wfbp.core.types import TensorSpec
from wfbp.errors import (
    DisagreementError,
    NotInitializedError,
    PeerError,
)
from wfbp.runtime import process, uncaught
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.named.operations import Collectives
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import JobRuntime, Runtime


@pytest.fixture
def open_backends(monkeypatch: pytest.MonkeyPatch) -> list[LocalBackend]:
    """Duplicates and parts of backends that were made and not closed."""
    is_open: list[LocalBackend] = []

    def noting(make: Any) -> Any:
        def made(*args: Any) -> Any:
            backend = make(*args)
            if backend is not None:
                is_open.append(backend)
            return backend

        return made

    def close(self: LocalBackend) -> None:
        if self in is_open:  # else it is the runtime's own
            is_open.remove(self)

    monkeypatch.setattr(LocalBackend, "duplicate", noting(LocalBackend.duplicate))
    monkeypatch.setattr(LocalBackend, "subset", noting(LocalBackend.subset))
    monkeypatch.setattr(LocalBackend, "close", close)
    return is_open


@pytest.mark.parametrize("unfinished", [False, True])
def test_communicators_are_freed_at_the_end(
    open_backends: list[LocalBackend], unfinished: bool
) -> None:
    """A program may call init() and shutdown() many times; communicators are few."""
    specs = [TensorSpec(name, (2,), "float32") for name in "ab"]
    gradient = np.ones(2, np.float32)

    def made(runtime: Runtime) -> Reducer:
        return Reducer(runtime, specs, ReducerOptions("layerwise", 1))

    def body(runtime: Runtime) -> None:
        collectives = Collectives(runtime)
        runtime.separate_planning()
        inner = collectives.lanes.get(collectives.add_set([0, 1]))
        for place in (runtime, runtime, *([inner.runtime] if inner else [])):
            made(place).close()
            made(place)
            used = made(place)
            for _ in range(6):  # until its plan is the wanted one
                for index in (1, 0):
                    used.mark_ready(index, gradient.ctypes.data, gradient)
                used.synchronize()
        if unfinished and runtime.rank == 0:
            used.mark_ready(1, gradient.ctypes.data, gradient)
            pause = threading.Event()
            for _ in range(1000):
                if used._lane.busy:
                    return
                pause.wait(1e-2)
            raise AssertionError("nothing was sent")

    all_well(run_ranks(3, body))
    # The lane of a step that the other rank of the process set never took, and its channel.
    assert len(open_backends) == (2 * 2 if unfinished else 0)


def test_exchanges_for_different_purposes() -> None:
    """A payload is read only by ranks that expect it."""

    def body(runtime: Runtime) -> list[bytes]:
        with pytest.raises(DisagreementError) as caught:
            runtime.channel.exchange(b"", "saving" if runtime.rank == 2 else "loading")
        told = f"rank {runtime.rank} of 3: ranks called different operations (ranks 0, 1: loading; "
        assert str(caught.value).startswith(f"{told}rank 2: saving). Every rank must")
        return runtime.channel.exchange(b"on", "SGD" if runtime.rank else "sgd", purpose="stepping")

    assert all_well(run_ranks(3, body)) == [[b"on"] * 3] * 3


def test_no_notices_are_read_once_the_backend_is_given_back() -> None:
    """The communicator is gone: Open MPI ends the job there. The same turn may be to read some."""
    backend = LocalWorld(1).backend(0)
    runtime = JobRuntime(backend, Config())
    told = []

    def close() -> None:
        told.append("closed")
        runtime.thread._loop._next_tick = 0.0

    def poll() -> list[tuple[int, bytes]]:
        told.append("polled")
        return []

    backend.close, backend.poll_notices = close, poll  # type: ignore[method-assign]
    runtime.shutdown()
    assert told[-1] == "closed"


@pytest.mark.usefixtures("short_grace")
def test_leaving_after_an_error_lets_the_others_leave() -> None:
    def body(runtime: Runtime) -> None:
        if runtime.rank == 0:
            with pytest.raises(PeerError, match="rank 1 has left"):
                runtime.channel.exchange(b"", "waiting")

    all_well(run_ranks(2, body, Config(timeout_s=300.0), join_s=60.0))


def test_what_fails_before_a_shutdown_does_not_keep_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others wait for it to leave."""

    def fail(_: Runtime) -> None:
        raise ArithmeticError("as asked")

    monkeypatch.setattr(process, "_finishers", [fail])
    wfbp.init(backend=LocalWorld(1).backend(0), config=Config())
    runtime = process.current("test")
    with pytest.raises(ArithmeticError, match="as asked"):
        wfbp.shutdown()
    assert not wfbp.is_initialized()
    with pytest.raises(NotInitializedError):
        runtime.check()


def test_an_error_is_printed_although_another_hook_redirects_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As torch.distributed's hook does, around the one that it replaces."""
    redirected, terminal, runtime = io.StringIO(), io.StringIO(), Mock()
    redirected.write("Traceback")
    monkeypatch.setattr(sys, "stderr", redirected)
    monkeypatch.setattr(sys, "__stderr__", terminal)
    uncaught._end(runtime, ValueError("broken"))
    assert terminal.getvalue() == "Traceback"
    runtime.fail_job.assert_called_once_with("ValueError: broken")

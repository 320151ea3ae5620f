"""The runtime of this process: made by ``init``, used everywhere, ended by ``shutdown``."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from typing import Any

from wfbp import native
from wfbp.comm.backend import Backend
from wfbp.config import Config, unknown_variables
from wfbp.errors import NotInitializedError, WfbpError
from wfbp.runtime import failure
from wfbp.runtime.collectives.operations import Collectives
from wfbp.runtime.runtime import Runtime
from wfbp.runtime.settings import check_settings

_runtime: Runtime | None = None
_finishers: list[Callable[[], None]] = []


def init(comm: Any = None, *, backend: Backend | None = None, config: Config | None = None) -> None:
    """Join the other ranks of this job; call it once, before any other function.

    Started by ``mpirun -np N``, all N processes must call it; started alone, the job has one
    rank. Calling it again does nothing. From here on an uncaught exception on one rank ends all
    ranks, with that rank's message.

    Args:
        comm: an mpi4py communicator to work on (it is duplicated); all of ``COMM_WORLD`` by
            default.
        backend: how ranks talk, instead of MPI.
        config: settings; from the environment's ``WFBP_*`` by default.

    Raises:
        ValueError: a ``WFBP_*`` variable cannot be read, or no directory made for records.
        PeerError: another rank could not make it.
        BackendError: MPI is missing or does not start, or a launcher (``torchrun``, ``srun``,
            another library's ``mpirun``) promised more ranks than MPI found.
        DisagreementError: ranks have different settings.
    """
    global _runtime
    if _runtime is not None:
        return
    config = config or Config.from_environment()
    _set_up_logging(config)
    if backend is None:
        from wfbp.comm.mpi.mpi import MpiBackend

        backend = MpiBackend(
            comm,
            start_timeout_s=config.timeout_s,
            shared_memory=config.shared_memory,
            check_launcher=config.check_launcher,
        )
    unknown = unknown_variables()
    if unknown and backend.local_rank == 0:
        logging.getLogger("wfbp").warning("%s", unknown)
    if native.MISSING and backend.local_rank == 0:
        logging.getLogger("wfbp").warning("%s", native.MISSING)
    runtime = Runtime(backend, config)
    try:
        check_settings(runtime)
        runtime.collectives = Collectives(runtime)
        if runtime.size > 1:
            runtime.separate_planning()
    except BaseException:
        runtime.shutdown()
        raise
    _runtime = runtime
    failure.install(runtime)
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the job; it waits until the other ranks leave too. Also done at exit."""
    global _runtime
    if _runtime is None:
        return
    try:
        for finish in _finishers:
            finish()
    finally:  # others wait for this rank to leave, whatever its own program makes of its end
        runtime, _runtime = _runtime, None
        atexit.unregister(shutdown)
        failure.uninstall()
        runtime.shutdown()


def before_shutdown(finish: Callable[[], None]) -> None:
    """Have ``finish`` called first by every :func:`shutdown`, while all ranks still answer."""
    _finishers.append(finish)


def is_initialized() -> bool:
    """Whether :func:`init` has been called, and :func:`shutdown` has not."""
    return _runtime is not None


def current(call: str) -> Runtime:
    """The runtime, for a public function of this name.

    Raises:
        NotInitializedError: there is none.
    """
    if _runtime is None:
        raise NotInitializedError(call)
    return _runtime


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return current("rank()").rank


def size() -> int:
    """Number of ranks."""
    return current("size()").size


def local_rank() -> int:
    """This process's number among the ranks on its host, from 0."""
    return current("local_rank()").local_rank


def local_size() -> int:
    """Number of ranks on this host."""
    return current("local_size()").local_size


def _leave_to_parent() -> None:
    """In a forked process, which is no rank: nothing that it does may reach the others.

    It shares the memory that they read, and MPI forbids it all calls. Who it is it may ask.
    """
    if _runtime is None or _runtime.size == 1:
        return
    atexit.unregister(shutdown)
    failure.uninstall()
    _runtime.thread.fail_in_fork(
        WfbpError(
            f"{_runtime.where}: this process was forked behind wfbp.init(), and is no rank; only "
            "its parent can communicate"
        )
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


def _set_up_logging(config: Config) -> None:
    logger = logging.getLogger("wfbp")
    logger.setLevel(config.log_level.upper())
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("wfbp: %(levelname)s: %(message)s"))
        logger.addHandler(handler)

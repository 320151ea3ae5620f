"""The runtime of this process: made by ``init``, which compares settings, ended by ``shutdown``."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from wfbp import native
from wfbp.comm.backend import HostBackend
from wfbp.comm.device import nccl
from wfbp.comm.waiting import num_cores
from wfbp.config import Config, read_environment, unknown_variables
from wfbp.core.ranks import counted
from wfbp.errors import NotInitializedError, WfbpError
from wfbp.launcher.rank import WFBPRUN, under_launcher
from wfbp.runtime import timeline_files, uncaught
from wfbp.runtime.cores import advice, num_threads, own_cores, part_of_cores
from wfbp.runtime.named.operations import Collectives
from wfbp.runtime.runtime import JobRuntime, Runtime
from wfbp.runtime.uncaught import describe_error

_runtime: JobRuntime | None = None
_operations: Collectives | None = None
"""Named operations of the runtime."""
_finishers: list[Callable[[Runtime], None]] = []
_watches_forks = False


def start(
    comm: Any = None,
    *,
    backend: HostBackend | None = None,
    config: Config | None = None,
    problem: Exception | None = None,
) -> None:
    """Start the runtime for ``wfbp.init()``; raises ``problem`` after meeting the others."""
    global _runtime, _operations, _watches_forks
    if _runtime is not None:
        return
    given: object = config  # whatever its type says
    if not isinstance(given, Config | None):
        problem = TypeError(f"config is {given!r}; expected a wfbp.Config")
    if problem is not None or config is None:
        config, unreadable = read_environment()
        problem = problem or (ValueError(unreadable) if unreadable else None)
    if not _is_communicator(comm):
        problem = TypeError(
            f"comm is {comm!r}; expected an mpi4py communicator, or the numbers of the "
            "ranks that take part"
        )
    if problem is not None and backend is None and not under_launcher():
        raise problem
    _set_up_logging(config)
    nccl.set_variables()
    if backend is None:
        backend = _mpi_backend(comm, config, problem)
    unknown = unknown_variables()
    if unknown and backend.local_rank == 0:
        logging.getLogger("wfbp").warning("%s", unknown)
    runtime = JobRuntime(backend, config)
    try:  # other ranks wait for this one from here on, so it must leave with a notice
        check_settings(runtime, problem)
        operations = Collectives(runtime)
        if config.record:
            _start_timeline(runtime)
        if runtime.size > 1:
            runtime.separate_planning()
    except BaseException:
        runtime.shutdown()
        raise
    _runtime, _operations = runtime, operations
    uncaught.install(runtime)
    atexit.register(shutdown)
    if not _watches_forks:
        _watches_forks = True
        os.register_at_fork(after_in_child=_leave_to_parent)


def _mpi_backend(comm: Any, config: Config, problem: Exception | None) -> HostBackend:
    """A backend of the ranks that meet by MPI; if they do not, reports ``problem``."""
    from wfbp.comm.mpi.mpi_backend import MpiBackend
    from wfbp.comm.mpi.start import world_rank

    patience_s = config.timeout_s
    if not _is_communicator(comm):
        # Without a communicator this rank meets only ranks that have none either. Others wait in
        # their communicator until this rank ends.
        comm, patience_s = None, min(patience_s, config.abort_grace_s)

    def give_up() -> None:
        if problem is not None:
            sys.stderr.write(f"wfbp: {world_rank()}{describe_error(problem)}\n")
            sys.stderr.flush()
            os._exit(1)  # the main thread is within MPI_Init, which no exception can end

    alone = threading.Timer(patience_s, give_up)
    alone.daemon = True
    if problem is not None:
        alone.start()
    try:
        return MpiBackend(
            comm,
            start_timeout_s=config.timeout_s,
            shared_memory=config.shared_memory,
            reproducible=config.reproducible,
            check_launcher=config.check_launcher,
        )
    finally:
        alone.cancel()


def _is_communicator(comm: Any) -> bool:
    """Whether ``comm`` looks like a communicator or numbers of ranks, or is None."""
    if isinstance(comm, Sequence) and not isinstance(comm, str | bytes):
        return all(isinstance(rank, Integral) for rank in comm)
    return comm is None or hasattr(comm, "Get_rank")


def shutdown() -> None:
    """Leave the job; it waits until the other ranks leave too. Also done at exit."""
    global _runtime, _operations
    if _runtime is None:
        return
    try:
        let_go(_runtime)
    finally:  # others wait for this rank to leave, whatever its own program makes of its end
        runtime, _runtime, _operations = _runtime, None, None
        atexit.unregister(shutdown)
        uncaught.uninstall()
        runtime.record(None)
        runtime.shutdown(uncaught.exit_status)
        if runtime.config.record and runtime.rank == 0:
            _merge_timelines(runtime)


def _start_timeline(runtime: JobRuntime) -> None:
    """Record all ranks' steps and operations; collective."""
    config, rank = runtime.config, runtime.rank
    path = timeline_files.rank_file(config.record, rank)
    on_one_host = runtime.local_size == runtime.size
    exchange = runtime.channel.exchange_values
    offset_s = 0.0 if on_one_host else timeline_files.clock_offset_s(exchange)
    steps, warn = config.record_steps, runtime.warn_once
    try:
        writer = timeline_files.TraceWriter(path, rank, offset_s=offset_s, steps=steps, warn=warn)
    except OSError as error:
        warn(
            f"timeline {path.parent}",
            f"rank {rank}: no timeline {path} ({error.strerror}); training continues",
        )
    else:
        runtime.record(writer)


def _merge_timelines(runtime: JobRuntime) -> None:
    """Merge all ranks' timelines that this host has; errors are logged."""
    folder = Path(runtime.config.record)
    paths = [timeline_files.rank_file(folder, rank) for rank in range(runtime.size)]
    try:
        documents = [timeline_files.load(path) for path in paths if path.exists()]
        timeline_files.save(timeline_files.merge(documents), folder / "timeline.json")
    except (OSError, ValueError) as error:
        logging.getLogger("wfbp").warning("the timelines were not merged: %s", error)


def before_end(finish: Callable[[Runtime], None]) -> None:
    """Have ``finish`` called, while all ranks still answer, before a runtime or set ends."""
    _finishers.append(finish)


def let_go(runtime: Runtime) -> None:
    """Have all users of a runtime stop using it; collective among its ranks."""
    for finish in _finishers:
        finish(runtime)


def is_initialized() -> bool:
    """Whether :func:`init` has been called, and :func:`shutdown` has not."""
    return _runtime is not None


def current(call: str) -> JobRuntime:
    """The runtime, for the public function ``call``; raises ``NotInitializedError`` without one."""
    if _runtime is None:
        raise NotInitializedError(call)
    return _runtime


def operations(call: str) -> Collectives:
    """The named operations of the runtime, as :func:`current`."""
    if _operations is None:
        raise NotInitializedError(call)
    return _operations


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
    """Make calls fail in a forked process, which shares memory with ranks but is none."""
    if _runtime is None or _runtime.size == 1:
        return
    atexit.unregister(shutdown)
    uncaught.uninstall()
    _runtime.thread.fail_in_fork(
        WfbpError(
            f"{_runtime.where}: this process was forked after wfbp.init() and is not a rank; only "
            "its parent can communicate"
        )
    )


def _set_up_logging(config: Config) -> None:
    logger = logging.getLogger("wfbp")
    logger.setLevel(config.log_level.upper())
    logging.getLogger("wfbp.summary").setLevel(logging.INFO)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("wfbp: %(levelname)s: %(message)s"))
        logger.addHandler(handler)


SHARED = (
    "reproducible",
    "zero_copy_min_bytes",
    "warmup_steps",
    "profile_steps",
    "trial_steps",
    "replan_threshold",
    "probe_budget_s",
    "record",
    "record_steps",
)
"""Fields of ``Config``. The schedule and its threshold are compared per optimizer."""

_MOST_HOSTS = 8
_MOST_THREADS = 4
"""Of a reduction: more do not read memory faster."""
_LABEL = "init()"
_SAME_SETTINGS = "Set it to the same value on every rank; mpirun passes variables on to all of them"


def check_settings(runtime: JobRuntime, problem: Exception | None = None) -> None:
    """Compare the shared settings of all ranks, and raise if any rank has a problem; collective."""
    with runtime.channel.sharing_errors(_LABEL):
        if problem is not None:
            raise problem
        _make_folder("WFBP_RECORD", runtime.config.record)
    shared = {f"WFBP_{name.upper()}": getattr(runtime.config, name) for name in SHARED}
    shared["WFBP_RECORD_STEPS"] = "-".join(map(str, runtime.config.record_steps))  # as it is set
    mine = platform.node(), own_cores(), (runtime.local_rank, runtime.local_size)
    ranks = runtime.channel.exchange_values(mine, _LABEL, [shared], _SAME_SETTINGS)
    runtime.places = [(place[0], place[1]) for *_, place in ranks]
    where = [(host, cores) for host, cores, _ in ranks]
    runtime.core_sharers = where.count(where[runtime.rank])
    host, own = where[runtime.rank]
    sharers = sum(there == host and not set(own).isdisjoint(cores) for there, cores in where)
    runtime.thread.loop.waiter.crowded = sharers > num_cores()
    note_threads(runtime, num_threads())
    native.use_threads(min(_MOST_THREADS, num_cores() // runtime.core_sharers))
    if runtime.rank == 0:
        _tell_who_takes_part(runtime, [host for host, _ in where])


def note_threads(runtime: JobRuntime, threads: int | None) -> None:
    """Note how many threads each rank has (None: unknown), and warn if cores are too few."""
    ranks, cores = runtime.core_sharers, num_cores()
    runtime.network.part_of_cores = part_of_cores(ranks, cores, threads)
    if problem := advice(ranks, cores, threads or 1, by_wfbprun=WFBPRUN in os.environ):
        runtime.warn_once("cores", problem)


def _tell_who_takes_part(runtime: JobRuntime, hosts: Sequence[str]) -> None:
    """Log ranks, hosts and library in one line."""
    per_host = Counter(hosts)
    shown = [f"{host} ({number})" for host, number in per_host.most_common(_MOST_HOSTS)]
    more = len(per_host) - len(shown)
    logging.getLogger("wfbp").info(
        "%s on %s: %s%s; %s",
        counted(runtime.size, "rank"),
        counted(len(per_host), "host"),
        ", ".join(shown),
        f" and {more} more" if more else "",
        runtime.library,
    )


def _make_folder(variable: str, folder: str) -> None:
    """Make the directory that a setting names, if it names one."""
    problem = ""
    try:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            problem = "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    except OSError as error:
        problem = f"it cannot be made: {error.strerror}"
    if problem:
        raise ValueError(
            f"{variable} is {folder!r}, but {problem}. Name a directory where every rank can "
            "write, or none"
        )

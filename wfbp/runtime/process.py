"""The runtime of this process: made by ``init``, used everywhere, ended by ``shutdown``.

``init`` compares the settings that must be the same on every rank, and installs hooks for uncaught
exceptions: a rank that fails tells the others why before the job ends.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_tb
from types import TracebackType
from typing import Any

from wfbp import native
from wfbp.comm.backend import Backend
from wfbp.config import Config, unknown_variables
from wfbp.errors import DisagreementError, NotInitializedError, WfbpError
from wfbp.runtime import timeline
from wfbp.runtime.collectives.operations import Collectives
from wfbp.runtime.consistency import check_argument_errors, sharing_argument_errors
from wfbp.runtime.runtime import Runtime, describe_error

_runtime: Runtime | None = None
_finishers: list[Callable[[Runtime], None]] = []


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
        from wfbp.comm.mpi.backend import MpiBackend

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
        if config.timeline:
            _start_timeline(runtime)
        if runtime.size > 1:
            runtime.separate_planning()
    except BaseException:
        runtime.shutdown()
        raise
    _runtime = runtime
    install(runtime)
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the job; it waits until the other ranks leave too. Also done at exit."""
    global _runtime
    if _runtime is None:
        return
    try:
        let_go(_runtime)
    finally:  # others wait for this rank to leave, whatever its own program makes of its end
        runtime, _runtime = _runtime, None
        atexit.unregister(shutdown)
        uninstall()
        if runtime.collectives is not None:
            runtime.collectives.record(None)
        runtime.shutdown()
        if runtime.config.timeline and runtime.rank == 0:
            _merge_timelines(runtime)


def _start_timeline(runtime: Runtime) -> None:
    """Record all ranks' steps and operations; collective."""
    assert runtime.collectives is not None
    config, rank = runtime.config, runtime.rank
    path = timeline.rank_file(config.timeline, rank)
    offset_s = timeline.clock_offset_s(runtime)
    steps = config.timeline_steps
    runtime.collectives.record(timeline.Timeline(path, rank, offset_s=offset_s, steps=steps))


def _merge_timelines(runtime: Runtime) -> None:
    """Make one file of all ranks' that are found here. What goes wrong is logged."""
    folder = Path(runtime.config.timeline)
    paths = [timeline.rank_file(folder, rank) for rank in range(runtime.size)]
    try:
        documents = [timeline.load(path) for path in paths if path.exists()]
        merged = folder / "timeline.json"
        merged.write_text(json.dumps(timeline.merge(documents)))
    except (OSError, ValueError) as error:
        logging.getLogger("wfbp").warning("the timelines were not merged: %s", error)


def before_end(finish: Callable[[Runtime], None]) -> None:
    """Have ``finish`` called before a runtime ends, while all of its ranks still answer.

    That is by every :func:`shutdown`, and where a process set is removed, with that set's runtime.
    """
    _finishers.append(finish)


def let_go(runtime: Runtime) -> None:
    """Whatever uses a runtime is to do without it from now on; collective among its ranks."""
    for finish in _finishers:
        finish(runtime)


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
    uninstall()
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
    logging.getLogger("wfbp.summary").setLevel(logging.INFO)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("wfbp: %(levelname)s: %(message)s"))
        logger.addHandler(handler)


SHARED = (
    "zero_copy_min_bytes",
    "warmup_steps",
    "profile_steps",
    "trial_steps",
    "trial_min_s",
    "replan_threshold",
    "probe_budget_s",
    "timeline",
    "timeline_steps",
)
"""Fields of ``Config``. The schedule and its threshold are compared per optimizer."""

_MOST_HOSTS = 8
_LABEL = "init(): comparing settings"


def check_settings(runtime: Runtime) -> None:
    """Compare the shared settings of all ranks; collective.

    Raises:
        ValueError: this rank cannot record its run where it should.
        PeerError: another rank cannot.
        DisagreementError: on every rank; which settings differ, and who has what.
    """
    with sharing_argument_errors(runtime, _LABEL):
        _make_folder("WFBP_RECORD_DIR", runtime.config.record_dir)
        _make_folder("WFBP_TIMELINE", runtime.config.timeline)
    mine = {name: _plain(getattr(runtime.config, name)) for name in SHARED}
    payload = json.dumps(["", mine, platform.node()]).encode()
    payloads = [json.loads(p) for p in runtime.exchange(payload, _LABEL)]
    check_argument_errors(runtime, "init()", payloads)
    settings_by_rank = [settings for _, settings, _ in payloads]
    differing = [
        name
        for name in SHARED
        if any(s[name] != settings_by_rank[0][name] for s in settings_by_rank)
    ]
    if differing:
        shown = ", ".join(
            _describe_setting(name, [s[name] for s in settings_by_rank]) for name in differing
        )
        raise DisagreementError(
            f"{runtime.where}: init(): ranks disagree on {shown}. Set it to the same value on "
            "every rank; mpirun passes variables on to all of them"
        )
    if runtime.rank == 0:
        _tell_who_takes_part(runtime, [host for _, _, host in payloads])


def _tell_who_takes_part(runtime: Runtime, hosts: Sequence[str]) -> None:
    """Log ranks, hosts and library in one line."""
    per_host = Counter(hosts)
    shown = [f"{host} ({number})" for host, number in per_host.most_common(_MOST_HOSTS)]
    more = len(per_host) - len(shown)
    logging.getLogger("wfbp").info(
        "%d rank%s on %d host%s: %s%s; %s",
        runtime.size,
        "s" * (runtime.size > 1),
        len(per_host),
        "s" * (len(per_host) > 1),
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
            f"{variable} is {folder!r}, but {problem}. Name a directory in which every rank can "
            "write, or none"
        )


def _plain(value: Any) -> Any:
    """A setting as it can be compared and shown: a range as its variable writes it."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else value


def _describe_setting(name: str, values: list[Any]) -> str:
    """The setting's variable, and which ranks have which value."""
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    parts = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {value}"
        for value, ranks in holders.items()
    ]
    return f"WFBP_{name.upper()} ({'; '.join(parts)})"


_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], Any]
_ThreadHook = Callable[[threading.ExceptHookArgs], Any]
_previous: tuple[_Hook, _ThreadHook] | None = None


def install(runtime: Runtime) -> None:
    """From now on an uncaught exception in a thread that trains ends the job."""
    global _previous
    if runtime.size == 1:
        return
    main, other = _previous = sys.excepthook, threading.excepthook

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if issubclass(kind, KeyboardInterrupt) and main is sys.__excepthook__:
            # As many tracebacks as ranks would bury what training has said.
            where = f"rank {runtime.rank} of {runtime.size}: KeyboardInterrupt{_place(traceback)}"
            sys.stderr.write(f"wfbp: {where}\n")
        else:
            main(kind, error, traceback)
        _end(runtime, error)

    def report_thread(found: threading.ExceptHookArgs) -> None:
        other(found)
        if found.exc_value is not None and runtime.thread.is_used_here:
            _end(runtime, found.exc_value)

    sys.excepthook, threading.excepthook = report, report_thread


def uninstall() -> None:
    """Put the previous hooks back."""
    global _previous
    if _previous is not None:
        sys.excepthook, threading.excepthook = _previous
        _previous = None


def _place(traceback: TracebackType | None) -> str:
    """Where a program was: the innermost line that is neither of this package nor of Python."""
    package = str(Path(__file__).resolve().parents[1])
    frames = [f for f in extract_tb(traceback) if not f.filename.startswith((package, "<frozen"))]
    return f" at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""


def _end(runtime: Runtime, error: BaseException) -> None:
    sys.stderr.flush()
    sys.stdout.flush()
    runtime.fail_job(describe_error(error))

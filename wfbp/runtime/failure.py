"""What happens to the job when a rank raises an exception that nobody catches.

The rank tells the others why before it goes; each of them raises a ``PeerError`` with that text
at its next wait or call, reports it in the same way, and the job ends. Without this, MPI would
leave the others waiting for ever.

The main thread counts, and every thread that has waited for communication: who trains. Others,
such as a progress bar's, may die without ending the program, as ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from wfbp.runtime.runtime import Runtime, describe_error

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


def _end(runtime: Runtime, error: BaseException) -> None:
    sys.stderr.flush()
    sys.stdout.flush()
    runtime.fail_job(describe_error(error))

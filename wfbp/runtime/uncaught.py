"""Ends the job after an uncaught exception; one line where a traceback tells nothing more."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary, extract_stack, extract_tb
from types import TracebackType
from typing import Any, NoReturn

from wfbp.errors import PeerError, WfbpError
from wfbp.runtime.runtime import JobRuntime

_told: BaseException | None = None
"""The error of another rank that was reported while the program still computed."""

exit_status = 0
"""The argument of ``sys.exit()``, which exception hooks and exit handlers are not given."""
_python_exit = sys.exit

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]
_ThreadHook = Callable[[threading.ExceptHookArgs], object]

_previous: tuple[_Hook, _ThreadHook] | None = None
"""The earlier hooks; None unless this module's are installed."""
_runtime: JobRuntime | None = None


def install(runtime: JobRuntime) -> None:
    """From now on an uncaught exception in a thread that trains ends the job."""
    global _previous, _runtime, _told
    _told = None
    if runtime.size > 1:
        _runtime = runtime
        _previous = sys.excepthook, threading.excepthook
        sys.excepthook, threading.excepthook = _report, _report_thread
        sys.exit = _exit
        runtime.thread.loop.on_unnoticed = lambda: _report_unnoticed(runtime)


def uninstall() -> None:
    global _previous, _runtime
    _runtime = None
    if sys.exit is _exit:
        sys.exit = _python_exit
    if _previous is not None:
        sys.excepthook, threading.excepthook = _previous
        _previous = None


def _exit(status: Any = None, /) -> NoReturn:
    """``sys.exit``, which notes the status for the other ranks: they end the job with it."""
    global exit_status
    if threading.current_thread() is threading.main_thread():
        exit_status = status if isinstance(status, int) else int(status is not None)
    _python_exit(status)


def _report(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    main = sys.__excepthook__ if _previous is None else _previous[0]
    line = ""
    if issubclass(kind, KeyboardInterrupt) and _runtime is not None:
        line = f"{_runtime.where}: KeyboardInterrupt {_place(traceback)}"
    elif issubclass(kind, PeerError):  # the traceback that helps is the other rank's
        line = f"PeerError: {error} (this rank was {_place(traceback)})"
    if error is _told:
        pass
    elif line and main is sys.__excepthook__:  # not if the program has its own hook
        sys.stderr.write(f"wfbp: {line}\n")
    else:
        main(kind, error, traceback)
    if _runtime is not None:
        _end(_runtime, error)


def _report_unnoticed(runtime: JobRuntime) -> None:
    """On the communication thread: why the launcher will end this rank, whose program computes."""
    global _told
    _told = runtime.thread.error
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    place = _place_of(extract_stack(frame))
    sys.stderr.write(f"wfbp: PeerError: {_told} (this rank was {place})\n")
    sys.stderr.flush()
    sys.stdout.flush()


def _report_thread(arguments: threading.ExceptHookArgs) -> None:
    other = threading.__excepthook__ if _previous is None else _previous[1]
    other(arguments)
    if _runtime is not None and arguments.exc_value is not None and _runtime.thread.is_used_here:
        _end(_runtime, arguments.exc_value)


def _place(traceback: TracebackType | None) -> str:
    """Place in the program: the innermost line that is neither of this package nor of Python."""
    return _place_of(extract_tb(traceback))


def _place_of(stack: StackSummary) -> str:
    ours = str(Path(__file__).resolve().parents[1]), "<frozen"
    python = Path(contextlib.__file__).parent  # where threads wait
    frames = [
        f for f in stack if not f.filename.startswith(ours) and Path(f.filename).parent != python
    ]
    last = frames[-1] if frames else None
    return f"at {last.filename}:{last.lineno}, in {last.name}" if last else "within wfbp"


def _end(runtime: JobRuntime, error: BaseException) -> None:
    # torch.distributed's hook redirects stderr to a buffer, which an abort would discard.
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        sys.__stderr__.write(sys.stderr.getvalue())
        sys.__stderr__.flush()
    sys.stderr.flush()
    sys.stdout.flush()
    runtime.fail_job(describe_error(error))


def describe_error(error: BaseException) -> str:
    """An exception in one line."""
    if isinstance(error, WfbpError):
        return f"{type(error).__name__}: {error}"
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

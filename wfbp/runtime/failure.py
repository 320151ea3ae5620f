"""What happens to the job when a rank raises an exception that nobody catches.

The rank tells the others why before it goes; each of them raises a ``PeerError`` with that text
at its next wait or call, reports it in the same way, and the job ends. Without this, MPI would
leave the others waiting for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from wfbp.runtime.runtime import Runtime, describe_error

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], Any]
_previous: _Hook | None = None


def install(runtime: Runtime) -> None:
    """From now on an uncaught exception in the main thread ends the job."""
    global _previous
    if runtime.size == 1:
        return
    previous = _previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        previous(kind, error, traceback)
        sys.stderr.flush()
        sys.stdout.flush()
        runtime.fail_job(describe_error(error))

    sys.excepthook = report


def uninstall() -> None:
    """Put the previous hook back."""
    global _previous
    if _previous is not None:
        sys.excepthook = _previous
        _previous = None

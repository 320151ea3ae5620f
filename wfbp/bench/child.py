"""Jobs that a benchmark starts, and ends with itself."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

GRACE_S = 30.0
"""A launcher that is told to end may have ranks to end and a link to take down."""


def run(command: Sequence[str], env: Mapping[str, str], timeout_s: float | None = None) -> int:
    """Run a job to its end; where this program is stopped, the job is told to end first.

    Args:
        command: what to start.
        env: its environment.
        timeout_s: it is told to end after this.

    Returns:
        Its exit status.

    Raises:
        subprocess.TimeoutExpired: it took longer.
        KeyboardInterrupt: this program was interrupted or terminated.

    Example:
        >>> run(["true"], {})
        0
    """
    with _terminations_raised(), subprocess.Popen(command, env=dict(env)) as job:
        try:
            return job.wait(timeout_s)
        except BaseException:
            job.terminate()
            try:
                job.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                job.kill()
            raise


@contextmanager
def _terminations_raised() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""What benchmarks need of the machine: jobs that end with them, foreign load, tables.

The kernel counts every busy tick of every core in ``/proc/stat``; what our own processes used is
in their ``stat`` files. The difference is foreign: other programs, or time that the hypervisor
took (steal). Interrupt time counts as busy, because the kernel charges the interrupts of our own
traffic to our own processes as well. Linux only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.table import Table

from wfbp.cli.tables import console

GRACE_S = 30.0
"""A launcher that is told to end may have ranks to end and a link to take down."""


def run_job(command: Sequence[str], env: Mapping[str, str], timeout_s: float | None = None) -> int:
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
        >>> run_job(["true"], {})
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


PROC = Path("/proc")
_IDLE_COLUMNS = frozenset({3, 4})  # idle and iowait
_GUEST_COLUMNS = frozenset({8, 9})  # already contained in user and nice


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds used up to a moment.

    Args:
        at_s: the moment, on the monotonic clock.
        busy_s: by everybody, all cores together.
        own_s: by our own processes.
    """

    at_s: float
    busy_s: float
    own_s: float

    def foreign_cores(self, later: Usage) -> float:
        """Cores kept busy by others, on average, from here to ``later``; never negative.

        >>> Usage(0.0, 10.0, 1.0).foreign_cores(Usage(2.0, 14.0, 4.0))
        0.5
        """
        foreign_s = (later.busy_s - self.busy_s) - (later.own_s - self.own_s)
        return max(0.0, foreign_s) / max(later.at_s - self.at_s, 1e-9)


def usage(processes: Iterable[int], proc: Path = PROC) -> Usage:
    """What the machine and the given processes (of one job) have used up to now."""
    busy_s = busy_seconds((proc / "stat").read_text())
    own_s = sum(process_seconds((proc / str(p) / "stat").read_text()) for p in processes)
    return Usage(time.monotonic(), busy_s, own_s)


def busy_seconds(stat: str) -> float:
    """Busy seconds of all cores together in the text of ``/proc/stat``."""
    label, *columns = stat.split("\n", 1)[0].split()
    if label != "cpu":
        raise ValueError(f"/proc/stat: expected the line of all cores first, found {label!r}")
    skipped = _IDLE_COLUMNS | _GUEST_COLUMNS
    return sum(int(t) for i, t in enumerate(columns) if i not in skipped) / _ticks_per_second()


def process_seconds(stat: str) -> float:
    """User and system seconds in the text of a process's or thread's ``stat`` file."""
    # The second field is the program's name in parentheses and may itself hold any character.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _ticks_per_second()


def thread_seconds(name: str, proc: Path = PROC) -> float:
    """CPU seconds used so far by this process's Python threads of that name."""
    return sum(
        _run_seconds(proc / "self" / "task" / str(thread.native_id))
        for thread in threading.enumerate()
        if thread.name == name
    )


def sent_bytes(interface: str, proc: Path = PROC) -> int:
    """Bytes that a network interface of this process's namespace has sent.

    Raises:
        ValueError: there is no such interface here.
    """
    for line in (proc / "self" / "net" / "dev").read_text().splitlines():
        label, _, counters = line.partition(":")
        if label.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"network interface {interface!r} not found in this namespace")


def _run_seconds(task: Path) -> float:
    """CPU seconds of one thread, to the nanosecond where the kernel keeps schedstat."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return process_seconds((task / "stat").read_text())


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a header; the first column is left-aligned, the others right."""
    table = Table(title=title, title_justify="left")
    for position, name in enumerate(header):
        table.add_column(name, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    console().print(table)

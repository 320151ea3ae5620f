"""The machine of a benchmark: its name, foreign load.

The kernel counts every busy tick of every core in ``/proc/stat``; what our own processes used is
in their ``stat`` files. The difference is foreign: other programs, or time that the hypervisor
took (steal). Interrupt time counts as busy, because the kernel charges the interrupts of our
traffic to our processes as well. Linux only.
"""

from __future__ import annotations

import os
import platform
import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

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


def _run_seconds(task: Path) -> float:
    """CPU seconds of one thread, to the nanosecond where the kernel keeps schedstat."""
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return process_seconds((task / "stat").read_text())


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")


def environment(*packages: str) -> dict[str, str]:
    """Hardware and versions, also of these packages if they are installed."""
    models = re.findall(r"model name\s*: (.*)", (PROC / "cpuinfo").read_text())
    facts = {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    for package in ("numpy", *packages):
        with suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts


def print_facts(facts: dict[str, str]) -> None:
    """In one line."""
    print(", ".join(f"{key} {value}" for key, value in facts.items()))

"""The machine of a benchmark: hardware, software and load; time of threads. Linux only."""

from __future__ import annotations

import os
import platform
import re
import threading
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def thread_seconds(name: str) -> float:
    """CPU seconds used so far by this process's Python threads of that name."""
    tasks = Path("/proc/self/task")
    return sum(
        int((tasks / str(thread.native_id) / "schedstat").read_text().split()[0]) / 1e9
        for thread in threading.enumerate()
        if thread.name == name
    )


def environment(*packages: str) -> dict[str, str]:
    """Hardware, load, and versions, also of these packages if they are installed."""
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    facts = {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads that wanted a core in the last minute": f"{os.getloadavg()[0]:.1f}",
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

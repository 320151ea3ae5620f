"""What every rank of a benchmark does alike."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from mpi4py import MPI


def run_or_abort(act: Callable[[], Any]) -> Any:
    """Call a function and return its result, on rank 0 alone; if one rank fails, all end."""
    try:
        result = act()
    except Exception as error:
        say(f"wfbp bench: error: rank {MPI.COMM_WORLD.rank}: {error}", everywhere=True)
        MPI.COMM_WORLD.Abort(1)
        raise
    return result if MPI.COMM_WORLD.rank == 0 else None


def count() -> int:
    """How many ranks this job has."""
    return MPI.COMM_WORLD.size


def say(text: str, everywhere: bool = False) -> None:
    """A line on stderr, of rank 0."""
    if everywhere or MPI.COMM_WORLD.rank == 0:
        print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What a figure depends on: command, ranks, machine, versions."""
    versions = {}
    for package in ("wfbp", "torch", "numpy", "mpi4py"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "command": sys.argv[1:],
        "ranks": MPI.COMM_WORLD.size,
        "mpi": MPI.Get_library_version().split("\n")[0].strip(" \0"),
        "machine": platform.platform(),
        "versions": versions,
    }

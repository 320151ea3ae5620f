"""Errors, messages and facts about the machine, shared by the ranks of a comparison."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from typing import Any

from mpi4py import MPI

from wfbp.runtime.runtime import FORWARDING_S


def run_or_abort(act: Callable[[], Any]) -> Any:
    """Call a function; its result on rank 0, None elsewhere; if one rank fails, all exit."""
    try:
        result = act()
    except Exception as error:
        message = f"wfbp bench: error: rank {MPI.COMM_WORLD.rank}: {error}"
        print(message, file=sys.stderr, flush=True)
        time.sleep(FORWARDING_S)
        MPI.COMM_WORLD.Abort(1)
        raise
    return result if MPI.COMM_WORLD.rank == 0 else None


def need_several() -> None:
    """Refuse a single rank at once: it has no rank to communicate with."""
    if MPI.COMM_WORLD.size == 1:
        raise ValueError(
            "a benchmark needs at least two ranks; start it as: mpirun -np N wfbp bench ..."
        )


def say(text: str) -> None:
    if MPI.COMM_WORLD.rank == 0:
        print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Command, ranks, machine and versions, which affect the results."""
    versions = {}
    for package in ("wfbp", "torch", "numpy", "mpi4py"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": sys.argv[1:],
        "ranks": MPI.COMM_WORLD.size,
        "mpi": MPI.Get_library_version().split("\n")[0].strip(" \0"),
        "machine": platform.platform(),
        "versions": versions,
    }

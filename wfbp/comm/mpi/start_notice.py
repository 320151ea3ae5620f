"""Reports why a rank's start of MPI hangs; a program that runs beside that rank.

Usage: ``python start_notice.py SECONDS``. It ends when its standard input is closed: MPI has
started (it receives ``OVER`` first), or the rank has ended; then it removes the rank's MPICH memory
from ``/dev/shm``. Run by path, it can import only the standard library.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

OVER = b"over"
"""The rank writes this when MPI has started, or failed to."""

_MOST_DIGITS = 20
_LOOK_S, _MOST_LOOK_S = 0.05, 1.0


def number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    """The number in the first of these launcher variables that is set, or None."""
    text = next((environment[name] for name in names if name in environment), "")
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def under_launcher(min_ranks: int = 2) -> bool:
    """Whether the environment describes this process as a rank of ``min_ranks`` ranks or more."""
    size = number(_SIZE, os.environ)
    return number(_RANK, os.environ) is not None and (size is None or size >= min_ranks)


def meets_by_mpi(url: str) -> bool:
    """Whether PyTorch's ``env://`` is to use MPI: a launcher started this rank, and the program or
    the user has named no other address than wfbprun."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    has_address = address and port and os.environ.get("WFBPRUN") != f"{address}:{port}"
    is_told = has_address and ("RANK" in os.environ or "rank=" in url)
    return under_launcher(min_ranks=1) and not is_told


def contradiction(environment: Mapping[str, str]) -> str:
    """How ``RANK`` or ``WORLD_SIZE`` differs from what MPI's launcher says; empty if neither."""
    for name, names in (("RANK", _RANK), ("WORLD_SIZE", _SIZE)):
        of_mpi = number(names, environment)
        if of_mpi is not None and environment.get(name, str(of_mpi)) != str(of_mpi):
            return (
                f"rank {number(_RANK, environment)}: expected {name}={of_mpi}, as MPI's launcher "
                f"says, found {name}={environment[name]}; unset RANK, WORLD_SIZE and LOCAL_RANK, "
                "or start with wfbprun, which sets them"
            )
    return ""


def main() -> None:
    """Wait; report after the time limit; remove the segments of a rank that ends meanwhile."""
    limit_s = float(sys.argv[1])
    begun_s, look_s, reported, rank = time.monotonic(), _LOOK_S, False, os.getppid()
    found: set[str] = set()
    while not select.select([sys.stdin], [], [], look_s)[0]:
        look_s = min(2 * look_s, _MOST_LOOK_S)
        found |= segments(rank)
        if not reported and time.monotonic() - begun_s >= limit_s:
            reported = True
            _tell(limit_s)
    if sys.stdin.buffer.read() != OVER:
        unlink(found)


def segments(process: int | str, prefixes: tuple[str, ...] = ("mpich_",)) -> set[str]:
    """Files in ``/dev/shm`` with these prefixes that a process has mapped so far."""
    wanted = tuple(f"/dev/shm/{prefix}" for prefix in prefixes)
    try:
        with open(f"/proc/{process}/maps", errors="replace") as file:
            names = {line.rstrip("\n").split(maxsplit=5)[-1] for line in file}
    except OSError:  # it has ended, or there is no such system
        return set()
    return {name for name in names if name.startswith(wanted) and os.path.exists(name)}


def unlink(names: set[str]) -> None:
    """Remove files; other ranks do, too."""
    for name in names:
        with suppress(OSError):  # another rank was faster
            os.unlink(name)


def _tell(limit_s: float) -> None:
    rank, size = number(_RANK, os.environ), number(_SIZE, os.environ)
    who = f"rank {rank}" + ("" if size is None else f" of {size}")
    sys.stderr.write(
        f"wfbp: {who}: MPI has not started within {limit_s:g} s, because some rank has not reached "
        "wfbp.init(). Look above for the error of a rank that ended before, and let every rank "
        "call wfbp.init(); WFBP_TIMEOUT_S sets the limit. Where this rank waits:\n"
    )
    sys.stderr.flush()


if __name__ == "__main__":
    main()

"""Reports why a rank's start of MPI hangs; a program that runs beside that rank.

Usage: ``python start_notice.py SECONDS WHO``. It ends when its standard input is closed: MPI has
started (it receives ``OVER`` first), or the rank has ended; then it removes the rank's MPICH memory
from ``/dev/shm``. Run by path, it can import only the standard library.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress

OVER = b"over"
"""The rank writes this when MPI has started, or failed to."""

_LOOK_S, _MOST_LOOK_S = 0.05, 1.0


def main() -> None:
    """Wait; report after the time limit; remove the segments of a rank that ends meanwhile."""
    limit_s, who = float(sys.argv[1]), sys.argv[2]
    begun_s, look_s, reported, rank = time.monotonic(), _LOOK_S, False, os.getppid()
    found: set[str] = set()
    while not select.select([sys.stdin], [], [], look_s)[0]:
        look_s = min(2 * look_s, _MOST_LOOK_S)
        found |= segments(rank)
        if not reported and time.monotonic() - begun_s >= limit_s:
            reported = True
            _tell(limit_s, who)
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


def _tell(limit_s: float, who: str) -> None:
    sys.stderr.write(
        f"wfbp: {who}: MPI has not started within {limit_s:g} s, because some rank has not reached "
        "wfbp.init(). Look above for the error of a rank that ended before, and let every rank "
        "call wfbp.init(); WFBP_TIMEOUT_S sets the limit. Where this rank waits:\n"
    )
    sys.stderr.flush()


if __name__ == "__main__":
    main()

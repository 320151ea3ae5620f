"""Recordings that a program starts and stops by Horovod's functions."""

from __future__ import annotations

from pathlib import Path

from wfbp.runtime import process
from wfbp.runtime.timeline import TraceWriter


def start_timeline(file_path: str | Path, mark_cycles: bool = False) -> None:
    """Record training steps and named operations for Perfetto or ``chrome://tracing``.

    Any rank may call it. ``WFBP_RECORD=directory`` records all ranks from ``init()`` on and also
    compares the clocks of hosts. An earlier recording is closed first.

    Args:
        file_path: rank 0's file; rank 3 writes ``NAME.rank3.json`` beside ``NAME.json``. It is
            readable at any time; ``wfbp timeline`` merges the files of all ranks.
        mark_cycles: ignored; there are no cycles.

    Raises:
        OSError: the file cannot be written.
    """
    runtime = process.current("start_timeline()")
    path, rank = Path(file_path), runtime.rank
    if rank:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    runtime.record(None)
    runtime.record(TraceWriter(path, rank, warn=runtime.warn_once))


def stop_timeline() -> None:
    """Write what is left of the timeline, and record no more."""
    process.current("stop_timeline()").record(None)

"""A record of named operations that ``chrome://tracing`` and Perfetto show."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Timeline:
    """When operations were submitted, negotiated and carried out.

    The communication thread records, a training thread begins and ends; appending to a list needs
    no lock.

    Args:
        path: of the file that :meth:`write` makes, in Chrome's trace format.
        mark_cycles: whether answers of the coordinator are marked.
    """

    def __init__(self, path: str | Path, mark_cycles: bool) -> None:
        self._path = Path(path)
        self._mark_cycles = mark_cycles
        self._begun_s = time.monotonic()
        self._begun_us = time.time_ns() // 1000
        self._events: list[dict[str, Any]] = []
        self._rows: dict[str, int] = {}

    def cycle(self) -> None:
        """The coordinator has answered."""
        if self._mark_cycles:
            self._add("CYCLE_START", "cycles", "i", time.monotonic(), s="g")

    def operation(self, kind: str, name: str, submitted_s: float, ready_s: float) -> None:
        """An operation ends now that was submitted and became ready then (``time.monotonic``)."""
        row = name if name.startswith(f"{kind}.") else f"{kind}.{name}"
        for what, start, end in (
            (f"NEGOTIATE_{kind.upper()}", submitted_s, ready_s),
            (kind.upper(), ready_s, time.monotonic()),
        ):
            self._add(what, row, "X", start, dur=round(max(end - start, 0.0) * 1e6, 3))

    def write(self) -> None:
        """Write the file.

        Raises:
            OSError: it cannot be written.
        """
        header = {"start_time_since_epoch_in_micros": self._begun_us}
        names = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": row,
                "args": {"name": name},
            }
            for name, row in self._rows.items()
        ]
        document = {"traceEvents": [*names, *self._events], "otherData": header}
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(document))
        partial.replace(self._path)

    def _add(self, what: str, row: str, phase: str, at_s: float, **more: Any) -> None:
        number = self._rows.setdefault(row, len(self._rows))
        at_us = round((at_s - self._begun_s) * 1e6, 3)
        self._events.append(
            {"name": what, "ph": phase, "pid": 0, "tid": number, "ts": at_us, **more}
        )

"""What Perfetto and ``chrome://tracing`` expect of a file of trace events (JSON object form)."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

ROUNDING_US = 0.01
"""Beginnings and lengths are each rounded to a nanosecond."""


def check(document: dict[str, Any]) -> None:
    """Raise ``AssertionError`` for the first event that a viewer would refuse or misplace."""
    spans: defaultdict[tuple[int, int], list[tuple[float, float, str]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str), event
        assert type(event["pid"]) is int, event
        assert type(event["tid"]) is int, event
        assert isinstance(event.get("args", {}), dict), event
        track = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name"), event
            assert isinstance(event["args"]["name"], str), event
            named.add(track)
            continue
        assert track in named, f"a track without a name: {event}"
        assert math.isfinite(event["ts"]), event
        assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert math.isfinite(event["dur"]), event
            assert event["dur"] >= 0, event
            spans[track].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        else:
            assert (event["ph"], event["s"]) == ("i", "t"), event
    for track, found in spans.items():
        _check_nesting(track, sorted(found, key=lambda span: (span[0], -span[1])))


def _check_nesting(track: tuple[int, int], spans: list[tuple[float, float, str]]) -> None:
    """Spans of one track lie side by side or within each other; viewers cannot show others."""
    around: list[tuple[float, float, str]] = []
    for span in spans:
        while around and around[-1][1] <= span[0] + ROUNDING_US:
            around.pop()
        assert not around or span[1] <= around[-1][1] + ROUNDING_US, (track, around[-1], span)
        around.append(span)

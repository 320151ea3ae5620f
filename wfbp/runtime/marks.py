"""The moments of one step, before they are seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wfbp.runtime.profile import Stamps
from wfbp.runtime.steps import GroupTime

Stamp = Any
"""A moment: seconds on the host, a timed event on a device; 0 is "did not"."""

Span = tuple[Stamp, Stamp]


@dataclass(frozen=True, slots=True)
class StepMarks:
    """When things happened in one step; see :class:`~wfbp.runtime.profile.Stamps`.

    Args:
        begun: the previous step's results were in hand.
        ready: per tensor.
        forward: per tensor.
        forward_end: forward ended.
        closed: the step closed.
        done: the results were in hand.
        update: the optimizer's update at the beginning of the step.
        waits: forward's waits for all-gathers.
        times: of groups that travelled in backward.
        gathers: of all-gathers.
    """

    begun: Stamp
    ready: Sequence[Stamp]
    forward: Sequence[Stamp]
    forward_end: Stamp
    closed: Stamp
    done: Stamp
    update: Span
    waits: Sequence[Span]
    times: Sequence[GroupTime]
    gathers: Sequence[GroupTime]


class Measured(NamedTuple):
    """The same in seconds, and when all groups travelled, gathers first."""

    stamps: Stamps
    times: list[GroupTime]


UNREAD = Measured(Stamps(0.0, [], []), [])
"""Of a step that was not measured."""


def read(marks: StepMarks, at: Callable[[Stamp], float]) -> Measured:
    """Turn moments into seconds. What was over before the step began is no part of it: gradients
    may have been forgotten since.

    Args:
        marks: of a step that is over.
        at: the seconds of a moment.
    """
    times = [_seconds(time, at) for time in marks.times]
    begun_s = at(marks.begun)
    stamps = Stamps(
        begun_s,
        [at(stamp) for stamp in marks.ready],
        [at(stamp) for stamp in marks.forward],
        at(marks.forward_end),
        at(marks.closed),
        at(marks.done),
        sum(t.packed_s - t.start_s for t in times),
        _length([marks.update], at, begun_s),
        _length(marks.waits, at, begun_s),
    )
    return Measured(stamps, [*(_seconds(time, at) for time in marks.gathers), *times])


def _seconds(time: GroupTime, at: Callable[[Stamp], float]) -> GroupTime:
    return GroupTime(time.group, at(time.start_s), at(time.packed_s), at(time.end_s))


def _length(spans: Sequence[Span], at: Callable[[Stamp], float], begun_s: float) -> float:
    return sum(max(0.0, at(end) - max(at(start), begun_s)) for start, end in spans)

"""The moments of one step, before they are seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wfbp.runtime.steps import GroupTime
from wfbp.runtime.tuning.profile import StepTimes

Timestamp = Any
"""A moment: seconds on the host, a timed event on a device; 0 is "did not"."""

Span = tuple[Timestamp, Timestamp]


@dataclass(frozen=True, slots=True)
class StepTimestamps:
    """When things happened in one step; see :class:`~wfbp.runtime.tuning.profile.StepTimes`.

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
        allgather: of all-gathers.
    """

    begun: Timestamp
    ready: Sequence[Timestamp]
    forward: Sequence[Timestamp]
    forward_end: Timestamp
    closed: Timestamp
    done: Timestamp
    update: Span
    waits: Sequence[Span]
    times: Sequence[GroupTime]
    gathers: Sequence[GroupTime]


class MeasuredStep(NamedTuple):
    """The same in seconds, and when all groups travelled, gathers first."""

    stamps: StepTimes
    times: list[GroupTime]


NOT_MEASURED = MeasuredStep(StepTimes(0.0, [], []), [])
"""Of a step that was not measured."""


def to_seconds(marks: StepTimestamps, at: Callable[[Timestamp], float]) -> MeasuredStep:
    """Turn moments into seconds. What was over before the step began is no part of it: gradients
    may have been forgotten since.

    Args:
        marks: of a step that is over.
        at: the seconds of a moment.
    """
    times = [_seconds(time, at) for time in marks.times]
    begun_s = at(marks.begun)
    stamps = StepTimes(
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
    return MeasuredStep(stamps, [*(_seconds(time, at) for time in marks.gathers), *times])


def _seconds(time: GroupTime, at: Callable[[Timestamp], float]) -> GroupTime:
    return GroupTime(time.group, at(time.start_s), at(time.packed_s), at(time.end_s))


def _length(spans: Sequence[Span], at: Callable[[Timestamp], float], begun_s: float) -> float:
    return sum(max(0.0, at(end) - max(at(start), begun_s)) for start, end in spans)

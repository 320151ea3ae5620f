"""Turns time stamps into a trace: one step's compute, combined over all ranks."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec
from wfbp.runtime.measuring import StepTimes


class TuningPhase(enum.Enum):
    """The state of a reducer's tuner; reports show the values."""

    WARM_UP = "warm-up"
    """Steps are counted, under a plan that needs no measurement."""
    PROFILE = "profile"
    """Compute is measured, with communication held back."""
    TRIAL = "trial"
    """Candidate plans run one after another."""
    INSTALLED = "installed"
    """The chosen plan runs until times drift."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Medians over some steps of one rank, since the step began, without waits; -1 if unknown."""

    ready_s: list[float]
    forward_s: list[float]
    forward_end_s: float
    closed_s: float
    packing_s: float
    update_s: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[StepTimes]) -> Profile:
        """The medians. A tensor without gradient in some of the steps is ready at their close."""

        def relative(step: StepTimes, stamp: float, absent: float = -1.0) -> float:
            return max(0.0, stamp - step.begun_s - step.waited_s) if stamp else absent

        ready, forward = [], []
        for k in range(len(steps[0].ready_s)):
            ever = any(step.ready_s[k] for step in steps)
            times = [relative(s, s.ready_s[k] or s.closed_s) for s in steps]
            ready.append(median(times) if ever else -1.0)
            forward.append(median(relative(s, s.forward_s[k]) for s in steps))
        return cls(
            ready,
            forward,
            median(relative(s, s.forward_end_s) for s in steps),
            median(relative(s, s.closed_s) for s in steps),
            median(s.packing_s for s in steps),
            median(s.update_s for s in steps),
        )


@dataclass(slots=True)
class _Event:
    spec: TensorSpec
    ready_s: float
    forward_s: float


def combine(
    specs: Sequence[TensorSpec], profiles: Sequence[Profile], kept: Collection[TensorSpec] = ()
) -> Trace | None:
    """One trace from every rank's profile, equal on every rank; None without any gradient.

    A collective starts when the last rank is ready, so each time is the maximum over ranks. A rank
    without a gradient that others have sends zeros when its step closes. Tensors without gradients
    on all ranks are left out unless ``kept``. The last gradient is ready when the step closes.
    """
    closed_s = max(p.closed_s for p in profiles)
    events = []
    for k, spec in enumerate(specs):
        times = [p.ready_s[k] for p in profiles]
        if max(times) < 0 and spec not in kept:
            continue
        ready_s = max(t if t >= 0 else closed_s for t in times)
        events.append(_Event(spec, ready_s, max(p.forward_s[k] for p in profiles)))
    if not events:
        return None
    events.sort(key=lambda e: e.ready_s)
    first_s = events[0].ready_s
    forward_end_s = max(p.forward_end_s for p in profiles)
    if not 0 <= forward_end_s <= first_s:
        # The end of forward is unknown: take the first gradient to cost as much as the average one.
        forward_end_s = max(0.0, first_s - (closed_s - first_s) / len(events))
    uses = _forward_times(events, forward_end_s)
    rows = []
    before_s = forward_end_s
    for position, event in enumerate(events):
        ready_s = closed_s if position == len(events) - 1 else min(event.ready_s, closed_s)
        ready_s = max(ready_s, before_s)
        rows.append(TraceTensor(event.spec, uses[position], ready_s - before_s))
        before_s = ready_s
    other_s = forward_end_s - sum(uses)
    return Trace("measured", tuple(reversed(rows)), max(0.0, other_s))


def _forward_times(events: Sequence[_Event], forward_end_s: float) -> list[float]:
    """Forward seconds of each tensor: from its first use to the next tensor's."""
    known = sorted(
        (e.forward_s, -position)
        for position, e in enumerate(events)
        if 0 <= e.forward_s <= forward_end_s
    )
    times = [0.0] * len(events)
    if not known:
        times[-1] = forward_end_s
        return times
    ends = [start for start, _ in known[1:]] + [forward_end_s]
    for (start, negated), end in zip(known, ends, strict=True):
        times[-negated] = end - start
    return times

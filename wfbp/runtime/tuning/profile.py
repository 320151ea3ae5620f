"""Turns time stamps into a trace: one step's compute, combined over all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec
from wfbp.runtime.measuring import StepTimes


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

        def relative(step: StepTimes, stamp: float) -> float:
            return max(0.0, stamp - step.begun_s - step.waited_s) if stamp else -1.0

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


def combine(
    specs: Sequence[TensorSpec], profiles: Sequence[Profile], kept: Collection[TensorSpec] = ()
) -> Trace | None:
    """One trace from every rank's profile, equal on every rank; None without any gradient.

    A collective starts when the last rank is ready, so each time is the maximum over ranks. A rank
    without a gradient that others have sends zeros when its step closes. Tensors without gradients
    on all ranks are left out unless ``kept``. The last gradient is ready when the step closes.
    """
    closed_s = max(p.closed_s for p in profiles)
    ready_s: dict[int, float] = {}
    for k, spec in enumerate(specs):
        times = [p.ready_s[k] for p in profiles]
        if max(times) >= 0 or spec in kept:
            ready_s[k] = min(closed_s, max(t if t >= 0 else closed_s for t in times))
    if not ready_s:
        return None
    backward = sorted(ready_s, key=lambda k: ready_s[k])
    first_s = ready_s[backward[0]]
    ready_s[backward[-1]] = closed_s
    forward_end_s = max(p.forward_end_s for p in profiles)
    if not 0 <= forward_end_s <= first_s:
        # The end of forward is unknown: take the first gradient to cost as much as the average one.
        forward_end_s = max(0.0, first_s - (closed_s - first_s) / len(backward))
    used_s = {k: max(p.forward_s[k] for p in profiles) for k in reversed(backward)}
    forward_s = _forward_times(used_s, forward_end_s)
    rows = []
    before_s = forward_end_s
    for k in backward:
        rows.append(TraceTensor(specs[k], forward_s[k], ready_s[k] - before_s))
        before_s = ready_s[k]
    other_s = forward_end_s - sum(forward_s.values())
    return Trace("measured", tuple(reversed(rows)), max(0.0, other_s))


def _forward_times(used_s: dict[int, float], end_s: float) -> dict[int, float]:
    """Forward seconds of each tensor: from its first use to the next tensor's."""
    known = sorted((k for k, s in used_s.items() if 0 <= s <= end_s), key=lambda k: used_s[k])
    times_s = dict.fromkeys(used_s, 0.0)
    if not known:
        times_s[next(iter(used_s))] = end_s
        return times_s
    ends_s = [used_s[k] for k in known[1:]] + [end_s]
    for k, next_s in zip(known, ends_s, strict=True):
        times_s[k] = next_s - used_s[k]
    return times_s

"""Which plan runs when: measure, plan, try, keep what is fastest, and notice when it no longer is.

    warm-up    steps by a plan that needs no measurement; nothing is recorded
    profile    the same plan with communication held back, so that compute is seen undisturbed
    trial      candidate plans in turn; the slower ones drop out from round to round
    installed  one plan; a lasting change of the iteration time leads back to profile

Every rank runs this machine and goes through the same states at the same steps: phases end after
a fixed number of steps, and decisions are taken only in *rounds*, from the messages of all ranks.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from wfbp.config import Config
from wfbp.core import planners
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.fit import fit_kappa
from wfbp.core.plan import Plan
from wfbp.core.timeline import Timeline, timeline
from wfbp.core.trace import Trace, TraceTensor
from wfbp.core.types import TensorSpec
from wfbp.runtime.profile import Profile, Stamps, combine

AUTO = "auto"
UNMEASURED = ("single", "threshold", "wfbp")
"""Planners that look at sizes only."""

SCHEDULES = (AUTO, *planners.ALL_REDUCE)

_HOPELESS = 1.5
_SURVIVE = (1.10, 1.05, 1.0)
_NOISE = 0.01
_WINDOW_STEPS = 20
_NUM_WINDOWS = 5


@dataclass
class _Candidate:
    plan: Plan
    times_s: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        return statistics.median(self.times_s)


class Tuner:
    """The plan of one engine over time. Used by one thread.

    Args:
        config: how long each phase lasts.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: for the ``threshold`` planner.
        specs: the tensors to plan, in forward order as far as it is known.

    Raises:
        ValueError: no such schedule.
    """

    def __init__(
        self, config: Config, schedule: str, threshold_bytes: int, specs: Sequence[TensorSpec]
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}")
        self._config = config
        self._schedule = schedule
        self._threshold_bytes = threshold_bytes
        self._num_joined: Counter[TensorSpec] = Counter()
        self._begin(specs)

    def join(self, specs: Sequence[TensorSpec]) -> None:
        """Begin again with these tensors too.

        One that joins for the second time, because it had no gradient while compute was measured,
        stays for good: beginning again and again would cost more than sending zeros.
        """
        self._num_joined.update(specs)
        self._begin([*specs, *self.plan.tensors])

    def _begin(self, specs: Sequence[TensorSpec]) -> None:
        nominal = Trace("unmeasured", tuple(TraceTensor(s, 0.0, 0.0) for s in specs))
        first = self._schedule if self._schedule in UNMEASURED else "threshold"
        self.trace: Trace | None = None
        self.costs: Costs | None = None
        self.predicted: Timeline | None = None
        self._incumbent: Plan | None = None
        self._candidates: list[_Candidate] = []
        self._enter("warm-up", self._make(first, nominal, Costs(LinearCost(0.0, 0.0))))

    def after_step(self, stamps: Stamps) -> None:
        """Take note of a step; :attr:`plan` may change, on every rank at the same step."""
        self._seen += 1
        if self.phase == "warm-up":
            if self._seen >= self._config.warmup_steps:
                self._enter("profile", _held(self.plan))
            return
        if self._seen > 1:  # the first step by a plan finds cold buffers
            self._steps.append(stamps)
        if self.phase == "trial" and len(self._steps) >= self._trial_steps:
            times = [s.done_s - s.begun_s for s in self._steps]
            self._times.append(times)
            if len(self._times) < len(self._alive):
                self._enter("trial", self._alive[len(self._times)].plan)
        elif self.phase == "installed":
            self._watch()

    @property
    def round_due(self) -> bool:
        """Whether every rank now enters a round, by count of steps."""
        if self.phase == "profile":
            return len(self._steps) >= self._config.profile_steps
        return self.phase == "trial" and len(self._times) == len(self._alive)

    @property
    def wants_round(self) -> bool:
        """Whether this rank asks for a round because the iteration time has changed."""
        return self.phase == "installed" and self._drifted >= _NUM_WINDOWS

    def message(self) -> dict[str, Any]:
        """What this rank brings to a round."""
        if self.phase == "profile":
            return {"profile": Profile.of(self._steps).to_json()}
        if self.phase == "trial":
            return {"times_s": self._times}
        return {"drifted": self.wants_round}

    def decide(self, messages: Sequence[dict[str, Any]], measure: Callable[[], Costs]) -> Plan:
        """Conclude a round; the same on every rank.

        Args:
            messages: what each rank brought, in rank order.
            measure: measures the network's costs; a collective.

        Returns:
            The plan to run from here on.
        """
        if self.phase == "profile":
            self._plan_anew(messages, measure)
        elif self.phase == "trial":
            self._drop_the_slower(messages)
        elif any(m["drifted"] for m in messages):
            self._incumbent = self.plan
            self._enter("profile", _held(self.plan))
        return self.plan

    @property
    def measured_s(self) -> float | None:
        """Median iteration time by the current plan, where it was seen."""
        recent = self._steps[-_WINDOW_STEPS:]
        return statistics.median(s.done_s - s.begun_s for s in recent) if recent else None

    @property
    def exposed_s(self) -> float | None:
        """Median of the time that training waited for communication."""
        recent = self._steps[-_WINDOW_STEPS:]
        return statistics.median(s.done_s - s.closed_s for s in recent) if recent else None

    def _enter(self, phase: str, plan: Plan) -> None:
        self.phase = phase
        self.plan = plan
        self._seen = 0
        self._steps: list[Stamps] = []
        self._baseline_s = 0.0
        self._drifted = 0
        if phase != "trial":
            self._times: list[list[float]] = []

    def _make(self, name: str, trace: Trace, costs: Costs) -> Plan:
        options = {"threshold_bytes": self._threshold_bytes} if name == "threshold" else {}
        return planners.plan(name, trace, costs, **options)

    def _plan_anew(self, messages: Sequence[dict[str, Any]], measure: Callable[[], Costs]) -> None:
        profiles = [Profile(**m["profile"]) for m in messages]
        kept = {spec for spec, times in self._num_joined.items() if times > 1}
        trace = combine(self.plan.tensors, profiles, kept)
        if trace is None:
            self._enter("warm-up", replace(self.plan, overlap=True))
            return
        packing_s = max(p.packing_s for p in profiles)
        self.trace = trace
        self.costs = _with_packing(measure(), packing_s / max(1, self.plan.total_bytes))
        if self._schedule == AUTO:
            plans = self._auto_candidates(trace, self.costs)
        else:
            plans = [self._make(self._schedule, trace, self.costs)]
        if self._incumbent is not None and set(self._incumbent.tensors) == set(trace.specs):
            plans = _distinct([_reordered(self._incumbent, trace), *plans])
        if len(plans) == 1:
            self._install(plans[0])
        else:
            self._alive = [_Candidate(plan) for plan in plans]
            self._candidates = list(self._alive)
            self._round = 0
            self._begin_round()

    def _auto_candidates(self, trace: Trace, costs: Costs) -> list[Plan]:
        """The starting plan, what simulates best, and what else might beat it in reality."""
        held_trace = Trace(
            trace.model,
            tuple(
                replace(t, backward_s=trace.backward_s if k == len(trace.tensors) - 1 else 0.0)
                for k, t in enumerate(trace.tensors)
            ),
        )
        plans = [self._make(name, trace, costs) for name in planners.ALL_REDUCE]
        plans.append(_held(self._make("oasr", held_trace, costs)))
        predicted = {p.digest: timeline(p, trace, costs).iteration_s for p in plans}
        best_s = min(predicted.values())
        plans.sort(key=lambda p: predicted[p.digest])
        started = self._make("threshold", trace, costs)
        return _distinct([started] + [p for p in plans if predicted[p.digest] < _HOPELESS * best_s])

    def _begin_round(self) -> None:
        self._times = []
        self._trial_steps = max(1, self._config.trial_steps * 2**self._round // 2)
        self._enter("trial", self._alive[0].plan)

    def _drop_the_slower(self, messages: Sequence[dict[str, Any]]) -> None:
        for position, candidate in enumerate(self._alive):
            per_rank = [m["times_s"][position] for m in messages]
            candidate.times_s.extend(max(times) for times in zip(*per_rank, strict=True))
        best_s = min(c.measured_s for c in self._alive)
        # Differences within noise decide nothing: there the order does, which begins with the
        # plan in use and goes on by prediction.
        chosen = next(c for c in self._alive if c.measured_s <= best_s * (1 + _NOISE))
        limit_s = best_s * _SURVIVE[self._round]
        self._alive = [c for c in self._alive if c.measured_s <= limit_s]
        self._round += 1
        if len(self._alive) > 1 and self._round < len(_SURVIVE):
            self._begin_round()
            return
        assert self.trace is not None
        assert self.costs is not None
        overlapped = [(c.plan, c.measured_s) for c in self._candidates if c.plan.overlap]
        if overlapped:
            kappa = fit_kappa(self.trace, self.costs, overlapped)
            self.costs = replace(self.costs, kappa=kappa)
        self._install(chosen.plan)

    def _install(self, plan: Plan) -> None:
        assert self.trace is not None
        assert self.costs is not None
        self.predicted = timeline(plan, self.trace, self.costs)
        self._incumbent = None
        self._enter("installed", plan)

    def _watch(self) -> None:
        """Compare each window of steps with the first; a lasting difference is drift."""
        if self._seen % _WINDOW_STEPS:
            return
        self._steps = self._steps[-_WINDOW_STEPS:]
        window_s = statistics.median(s.done_s - s.begun_s for s in self._steps)
        if not self._baseline_s:
            self._baseline_s = window_s
        change = abs(window_s - self._baseline_s) / self._baseline_s
        self._drifted = self._drifted + 1 if 0 < self._config.drift < change else 0


def _held(plan: Plan) -> Plan:
    return replace(plan, overlap=False)


def _with_packing(costs: Costs, packing_s_per_byte: float) -> Costs:
    """Costs as groups have them: a group is packed before it travels."""
    curve = costs.all_reduce
    assert isinstance(curve, PiecewiseCost)
    points = tuple((n, s + n * packing_s_per_byte) for n, s in curve.points)
    return replace(costs, all_reduce=PiecewiseCost(points))


def _reordered(plan: Plan, trace: Trace) -> Plan:
    """The same groups over the trace's tensor order, so that one trace predicts all candidates."""
    place = {spec: k for k, spec in enumerate(trace.specs)}
    groups = tuple(
        replace(g, tensors=tuple(place[plan.tensors[k]] for k in g.tensors)) for g in plan.groups
    )
    return replace(plan, tensors=trace.specs, groups=groups)


def _distinct(plans: Sequence[Plan]) -> list[Plan]:
    """Without plans that send the same groups in the same way as an earlier one."""
    seen = set()
    kept = []
    for plan in plans:
        key = (plan.tensors, plan.groups, plan.overlap)
        if key not in seen:
            seen.add(key)
            kept.append(plan)
    return kept

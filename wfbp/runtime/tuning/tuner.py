"""The tuner: which plan runs when. Measure, plan, try, keep the fastest, replan when it is slower.

The training thread gives it every step (:meth:`Tuner.after_step`), which may start the next plan of
a trial. Rounds end on all ranks together (:meth:`Tuner.decide`).
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from wfbp.config import Config
from wfbp.core import planners
from wfbp.core.cost import Costs
from wfbp.core.fit import fit_kappa
from wfbp.core.plan import Plan
from wfbp.core.timeline import Timeline, iteration_by_kappa, timeline
from wfbp.core.trace import Trace
from wfbp.core.types import ALL_REDUCE_SCHEDULES, AUTO, Operation, TensorSpec
from wfbp.runtime.tuning.candidates import (
    auto_candidates,
    check_schedule,
    decode_groups,
    distinct,
    encode_groups,
    first_plan,
    further_candidates,
    held,
    make,
    reordered,
    with_packing,
)
from wfbp.runtime.tuning.profile import Profile, StepTimes, TuningPhase, combine
from wfbp.runtime.tuning.trial import (
    Candidate,
    EliminationTrial,
    SearchTrial,
    Times,
    Trial,
    num_cold,
)

log = logging.getLogger("wfbp")

Share = Callable[[Callable[[], Any]], Any]
"""Returns on every rank what the function returns on rank 0."""

_NUM_WINDOWS = 5


class DriftDetector:
    """Compares each window of steps with the first one.

    ``limit`` is the relative change that counts; 0 turns it off.

    Example:
        >>> drift = DriftDetector(0.25)
        >>> for window_s in (1.0, 1.1, 2.0, 2.0, 2.0, 2.0, 2.0):
        ...     drift.add(window_s)
        >>> drift.has_drifted
        True
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._baseline_s = 0.0
        self._num_drifted = 0

    def add(self, window_s: float) -> None:
        """The median iteration of a window."""
        self._baseline_s = self._baseline_s or window_s
        change = abs(window_s - self._baseline_s) / self._baseline_s
        self._num_drifted = self._num_drifted + 1 if 0 < self._limit < change else 0

    @property
    def is_drifting(self) -> bool:
        """Whether the latest window differed from the first."""
        return self._num_drifted > 0

    @property
    def has_drifted(self) -> bool:
        """Whether some windows in a row differed from the first."""
        return self._num_drifted >= _NUM_WINDOWS


_WINDOW_STEPS = 20
_MOST_STEPS = 400
_LIMIT_STEPS = 24
_LIMIT_S = 32
"""All trials of a choice take at most so many times the steps and seconds that a plan is tried for
in two rounds, about, whichever is longer."""
_FIRST_SHARE = 0.75
"""Of these, for the plans that are made before interference is known."""
_TRY_AGAIN = 4
"""Plans are compared again once the installed one has run for so many times the steps of all
trials."""
_CLOSE = 1.25
_DISTURBED = 1.1
_FEW_ROUNDS = 3
"""A plan that took so many times its forecast, and was dropped after so few rounds, may have been
disturbed; it is compared again if its forecast is less than what the chosen plan took."""
_MOST_UNDECIDED = 4
_REGRET = 0.02
_REGRET_WINDOWS = 3
_MOST_RIVALS = 3


class Tuner:
    """The plan of one engine over time. Used by one thread.

    Args:
        config: how long each phase lasts.
        schedule: a planner's name, or ``auto``.
        threshold_bytes: for the ``threshold`` planner, and for the first plan of the others.
        specs: the tensors to plan, in forward order as far as it is known.
        decouples: whether the caller can use schedules that decouple all-reduce.
        num_updaters: ranks that share the update of a decoupled tensor; 1 where each does all.
        tells: whether this rank logs; one does.
        name: of the optimizer, for logs.
        wire_dtype: the type in which wider gradients are reduced, if not their own.
        gathers_gradients: whether all-gathers bring gradients, in that type, too.
    """

    def __init__(
        self,
        config: Config,
        schedule: str,
        threshold_bytes: int,
        specs: Sequence[TensorSpec],
        decouples: bool = False,
        num_updaters: int = 1,
        *,
        tells: bool = False,
        name: str = "optimizer",
        wire_dtype: str = "",
        gathers_gradients: bool = False,
    ) -> None:
        self._tells = tells
        self._name = name
        self._wire_dtype = wire_dtype
        self._gathers_gradients = gathers_gradients
        self._part = 1.0  # of the bytes that are planned, as far as they are reduced
        check_schedule(schedule, decouples)
        self._decouples = decouples and schedule not in ALL_REDUCE_SCHEDULES
        self._spared = 1.0 - 1.0 / num_updaters
        self._update_s = 0.0
        self._kappa = 0.0  # as the last trial showed it; what is planned next counts on it
        self._config = config
        self._schedule = schedule
        self._threshold_bytes = threshold_bytes
        self._num_joined: Counter[TensorSpec] = Counter()
        self._cold_s: float | None = None  # the plan's latest step that does not count
        self._begin(specs)

    def add_tensors(self, specs: Sequence[TensorSpec]) -> None:
        """Begin again with these tensors too.

        One that joins for the second time, because it had no gradient while compute was measured,
        stays for good: beginning again and again would cost more than sending zeros.
        """
        self._num_joined.update(specs)
        self._begin([*specs, *self.plan.tensors])

    def _begin(self, specs: Sequence[TensorSpec]) -> None:
        self.trace: Trace | None = None
        self.costs: Costs | None = None
        self._prediction: tuple[tuple[Plan, Trace, Costs], Timeline] | None = None
        self._incumbent: Plan | None = None
        self._trial: Trial | None = None
        self._tried: list[Candidate] = []
        self._num_trial_steps = 0
        self._undecided: list[Plan] = []
        self._regret_windows = _REGRET_WINDOWS
        self._enter(TuningPhase.WARM_UP, first_plan(self._schedule, specs, self._threshold_bytes))

    def _tell(self, message: str, *values: object) -> None:
        if self._tells:
            log.info(f"%s: {message}", self._name, *values)

    def after_step(self, stamps: StepTimes) -> None:
        """Take note of a step; :attr:`plan` may change, on every rank at the same step."""
        self._seen += 1
        if self.phase is TuningPhase.WARM_UP:
            if self._seen >= self._config.warmup_steps:
                self._profile()
            return
        if self._seen > self._num_cold:  # a plan's first steps find cold memory
            self._steps.append(stamps)
        else:
            self._cold_s = stamps.done_s - stamps.begun_s
        if self.phase is TuningPhase.TRIAL:
            assert self._trial is not None
            self._num_trial_steps += 1
            if len(self._steps) < self._trial.num_steps:
                return
            self._times.append([s.done_s - s.begun_s for s in self._steps])
            if len(self._times) < len(self._trial.plans):
                self._enter(TuningPhase.TRIAL, self._trial.plans[len(self._times)])
        elif self.phase is TuningPhase.INSTALLED:
            self._watch()

    @property
    def _num_cold(self) -> int:
        """Steps after a change of plans that tell nothing."""
        if self.phase is not TuningPhase.TRIAL:
            return 1
        assert self._trial is not None
        return num_cold(self._trial.num_steps)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The collectives whose costs matter."""
        return tuple(Operation) if self._decouples else (Operation.ALL_REDUCE,)

    @property
    def wire_bytes(self) -> int:
        """Bytes of all gradients as they are reduced."""
        return sum(spec.wire_bytes(self._wire_dtype) for spec in self.plan.tensors)

    @property
    def message_costs(self) -> Costs | None:
        """The costs by the bytes of messages, which are fewer than the planned ones under
        compression."""
        if self.costs is None:
            return None
        return self.costs.compressed(1.0 / self._part, self._gathers_gradients)

    @property
    def doubts_costs(self) -> bool:
        """Whether costs must be measured anew: the iteration time changed, maybe by the network."""
        return self._incumbent is not None

    @property
    def round_due(self) -> bool:
        """Whether every rank now enters a round, by count of steps."""
        if self.phase is TuningPhase.PROFILE:
            return len(self._steps) >= self._config.profile_steps
        if self.phase is not TuningPhase.TRIAL:
            return False
        assert self._trial is not None
        return len(self._times) == len(self._trial.plans)

    @property
    def wants_round(self) -> bool:
        """Whether this rank asks for a round: the iteration time has changed, another plan was
        faster in its trial than the installed one is now, or an undecided trial is to be repeated.
        """
        return self.phase is TuningPhase.INSTALLED and (
            self._drift_detector.has_drifted or self._looks_again or bool(self._rivals(self._now_s))
        )

    @property
    def _looks_again(self) -> bool:
        return (
            self.phase is TuningPhase.INSTALLED
            and bool(self._undecided)
            and self._can_try_again
            and self._config.replan_threshold > 0
        )

    @property
    def _can_try_again(self) -> bool:
        """Whether the installed plan has run for so long that trials are a small part of all."""
        return self._seen >= _TRY_AGAIN * self._num_trial_steps

    def message(self) -> dict[str, Any]:
        """What this rank brings to a round."""
        if self.phase is TuningPhase.PROFILE:
            return {"profile": Profile.of(self._steps).to_json()}
        if self.phase is TuningPhase.TRIAL:
            return {"times_s": self._times}
        return {
            "wants_round": self.wants_round,
            "drifted": self._drift_detector.has_drifted,
            "looks_again": self._looks_again,
            "now_s": self._now_s,
        }

    def decide(
        self,
        messages: Sequence[dict[str, Any]],
        measure: Callable[[], Costs],
        share: Share = lambda compute: compute(),
    ) -> Plan:
        """Conclude a round, and return the plan to run from here on; the same on every rank.

        Args:
            messages: each rank's :meth:`message`, in rank order.
            measure: measures the network's costs; a collective.
            share: computes on rank 0 and returns the result, in JSON's types, on every rank. So
                ranks that share cores do not plan at once, and agree whatever machines they run on.
        """
        if self.phase is TuningPhase.PROFILE:
            self._plan_anew(messages, measure, share)
        elif self.phase is TuningPhase.TRIAL:
            self._conclude_round([m["times_s"] for m in messages], share)
        elif any(m["drifted"] for m in messages):
            self._incumbent = self.plan
            self._tell(
                "the iteration time has changed for long, to %.1f ms: measuring and planning anew",
                (self.measured_s or 0.0) * 1e3,
            )
            self._profile()
        elif any(m["looks_again"] for m in messages):
            self._tell("comparing again what an earlier trial could not tell apart")
            self._return_to(self._undecided, share)
        elif rivals := self._rivals(max(m["now_s"] for m in messages)):
            # Perhaps everything takes longer now; each time it is therefore watched for twice as
            # long before the next return.
            self._regret_windows *= 2
            self._tell("other plans were faster in their trial than this one is now")
            self._return_to([c.plan for c in rivals], share)
        return self.plan

    @property
    def predicted(self) -> Timeline | None:
        """The prediction for the plan in use; None before compute and network are measured."""
        if self.trace is None or self.costs is None:
            return None
        key = self.plan, self.trace, self.costs
        if self._prediction is None or any(
            a is not b for a, b in zip(self._prediction[0], key, strict=True)
        ):
            if set(self.plan.tensors) != set(self.trace.specs):
                return None
            plan = reordered(self.plan, self.trace)
            other_s = max(0.0, self.trace.other_s - self._saved_s(plan))
            trace = replace(self.trace, other_s=other_s)
            self._prediction = key, timeline(plan, trace, self.costs)
        return self._prediction[1]

    @property
    def measured_s(self) -> float | None:
        """Median iteration time by the current plan, where it was seen: of late, in its trial, or
        in the first step, which finds cold memory."""
        recent = self._steps[-_WINDOW_STEPS:]
        if recent:
            return statistics.median(s.done_s - s.begun_s for s in recent)
        tried = [c.measured_s for c in self._tried_so_far if c.plan.digest == self.plan.digest]
        return tried[-1] if tried else self._cold_s

    @property
    def _tried_so_far(self) -> list[Candidate]:
        under_way = (
            self._trial.candidates if self.phase is TuningPhase.TRIAL and self._trial else []
        )
        return [c for c in (*self._tried, *under_way) if c.num_rounds]

    @property
    def exposed_s(self) -> float | None:
        """Median of the time that training waited for communication."""
        recent = self._steps[-_WINDOW_STEPS:]
        if not recent:
            return None
        return statistics.median(s.done_s - s.closed_s + s.waited_s for s in recent)

    def _enter(self, phase: TuningPhase, plan: Plan) -> None:
        self.phase = phase
        self.plan = plan
        self._seen = 0
        self._cold_s = None
        self._steps: list[StepTimes] = []
        self._drift_detector = DriftDetector(self._config.replan_threshold)
        self._windows_s: list[float] = []
        if phase is not TuningPhase.TRIAL:
            self._times: list[list[float]] = []

    def _profile(self) -> None:
        self._tell(
            "measuring compute for %d steps, by %s", self._config.profile_steps, self.plan.summary
        )
        self._enter(TuningPhase.PROFILE, held(self.plan))

    def _plan_anew(
        self, messages: Sequence[dict[str, Any]], measure: Callable[[], Costs], share: Share
    ) -> None:
        profiles = [Profile(**m["profile"]) for m in messages]
        kept = {spec for spec, times in self._num_joined.items() if times > 1}
        trace = combine(self.plan.tensors, profiles, kept)
        if trace is None:
            self._enter(TuningPhase.WARM_UP, replace(self.plan, overlap=True))
            return
        self._tried = []
        self._num_trial_steps = 0
        self._undecided = []
        self._regret_windows = _REGRET_WINDOWS
        packing_s = max(p.packing_s for p in profiles)
        update_s = max(p.update_s for p in profiles)
        self._update_s = update_s / (1.0 - self._spared * self.plan.decoupled_part)
        trace = replace(trace, other_s=trace.other_s + self._update_s - update_s)
        if self._decouples and self._gathers_gradients:
            trace = trace.updated_when_read(update_s)
        self.trace = trace
        self._tell(
            "measured compute of %d tensors, %.1f MB: forward %.1f ms, backward %.1f, other %.1f",
            len(trace.tensors),
            self.plan.total_bytes * 1e-6,
            trace.forward_s * 1e3,
            trace.backward_s * 1e3,
            trace.other_s * 1e3,
        )
        self._part = self.wire_bytes / max(1, self.plan.total_bytes) or 1.0
        costs = measure().compressed(self._part, self._gathers_gradients)
        costs = with_packing(costs, packing_s / max(1, self.plan.total_bytes))
        self.costs = costs = replace(costs, kappa=self._kappa)
        if self._schedule == "dear":

            def dear(threshold_bytes: int) -> Plan:
                return planners.plan("dear", trace, costs, threshold_bytes=threshold_bytes)

            first_bytes = self._threshold_bytes
            self._try(SearchTrial(dear, first_bytes, self._trial_steps(dear(first_bytes))))
            return

        def plan() -> list[dict[str, Any]]:
            if self._schedule == AUTO:
                plans = auto_candidates(trace, costs, self._threshold_bytes, self._decouples)
            else:
                plans = [make(self._schedule, trace, costs, self._threshold_bytes)]
            return encode_groups(plans)

        plans = decode_groups(share(plan), trace)
        if self._incumbent is not None and set(self._incumbent.tensors) == set(trace.specs):
            plans = distinct([reordered(self._incumbent, trace), *plans])
        if len(plans) == 1:
            self._install(plans[0])
        else:
            self._eliminate(plans, share, _FIRST_SHARE if self._schedule == AUTO else 1.0)

    def _trial_steps(self, plan: Plan) -> int:
        """Steps per candidate in two rounds: as many as the configured time holds."""
        enough = self._steps_in(self._config.trial_min_s, plan)
        return max(self._config.trial_steps, min(enough, _MOST_STEPS))

    def _steps_in(self, seconds: float, plan: Plan) -> int:
        assert self.trace is not None
        assert self.costs is not None
        expected_s = timeline(plan, self.trace, self.costs).iteration_s
        return math.ceil(seconds / expected_s) if expected_s > 0 else 0

    def _eliminate(
        self,
        plans: Sequence[Plan],
        share: Share,
        part: float = 1.0,
        spent: tuple[int, float] = (0, 0.0),
    ) -> None:
        """Compare plans, the first of which is in use.

        ``part`` is the share of the steps and seconds that trials may take, ``spent`` what they
        have taken.
        """
        most_steps = round(part * _LIMIT_STEPS * self._config.trial_steps) - spent[0]
        most_s = part * _LIMIT_S * self._config.trial_min_s - spent[1]
        self._tell(
            "trial of %d plans, of at most %d steps or %.1f s",
            len(plans),
            max(0, most_steps),
            max(0.0, most_s),
        )
        num_steps = self._trial_steps(plans[0])

        def forecast(candidates: Sequence[Candidate]) -> Sequence[float]:
            def each_s() -> list[float]:
                kappa = self._fit_kappa(candidates)
                return [max(self._forecast_s(c.plan, kappa), 1e-9) for c in candidates]

            shared: list[float] = share(each_s)
            return shared

        self._try(EliminationTrial(plans, num_steps, most_steps, most_s, forecast))

    def _try(self, trial: Trial) -> None:
        self._trial = trial
        self._times = []
        self._enter(TuningPhase.TRIAL, trial.plans[0])

    def _conclude_round(self, ranks: Sequence[Times], share: Share) -> None:
        assert self._trial is not None
        assert self.trace is not None
        assert self.costs is not None
        chosen = self._trial.conclude(ranks)
        times = sorted((c for c in self._trial.candidates if c.num_rounds), key=_measured_s)
        self._tell(
            "trial, %d steps so far: %s",
            self._num_trial_steps,
            "; ".join(f"{c.plan.summary} {c.measured_s * 1e3:.1f} ms" for c in times),
        )
        if chosen is None:
            self._try(self._trial)
            return
        is_first = not self._tried
        again = {c.plan.digest for c in self._trial.candidates}
        self._tried = [c for c in self._tried if c.plan.digest not in again]
        self._tried += self._trial.candidates
        close_s = _CLOSE * min(c.measured_s for c in self._trial.candidates)
        near = {c.plan.digest for c in self._trial.candidates if c.measured_s <= close_s}
        self._undecided += [p for p in self._trial.undecided if p.digest in near]
        trace, costs = self.trace, self.costs
        chosen_s = next(c.measured_s for c in self._trial.candidates if c.plan is chosen)

        def plan() -> tuple[float, list[dict[str, Any]], list[int]]:
            kappa = self._fit_kappa(self._tried)
            further: list[Plan] = []
            if self._schedule == AUTO and is_first:
                tried = [c.plan for c in self._tried]
                learnt = replace(costs, kappa=kappa)
                further = further_candidates(tried, chosen, trace, learnt, self._decouples)
            disturbed = []
            for k, c in enumerate(self._tried):
                forecast_s = self._forecast_s(c.plan, kappa)
                slow = c.num_rounds < _FEW_ROUNDS and c.measured_s > _DISTURBED * forecast_s
                if slow and forecast_s < chosen_s:
                    disturbed.append((forecast_s, k))
            return kappa, encode_groups(further), [k for _, k in sorted(disturbed)]

        self._kappa, further, disturbed = share(plan)
        self.costs = replace(costs, kappa=self._kappa)
        self._undecided += [self._tried[k].plan for k in disturbed]
        if further:
            plans = [chosen, *decode_groups(further, trace)]
            self._eliminate(plans, share, spent=(self._num_trial_steps, self._trial.spent_s))
            return
        self._install(chosen)

    def _install(self, plan: Plan) -> None:
        rivals = {p.digest: p for p in self._undecided if p.digest != plan.digest}
        self._undecided = list(rivals.values())[:_MOST_UNDECIDED]
        self._incumbent = None
        self._enter(TuningPhase.INSTALLED, plan)
        assert self.predicted is not None
        self._tell(
            "installed %s: predicted %.1f ms, T/LB %.3f%s",
            plan.summary,
            self.predicted.iteration_s * 1e3,
            self.predicted.ratio_to_lower_bound,
            "" if self.measured_s is None else f"; {self.measured_s * 1e3:.1f} ms in its trial",
        )

    def _fit_kappa(self, candidates: Sequence[Candidate]) -> float:
        """How much communication slows down compute, by what was measured."""
        assert self.trace is not None
        assert self.costs is not None
        overlapped = [
            (c.plan, c.measured_s + self._saved_s(c.plan)) for c in candidates if c.plan.overlap
        ]
        return fit_kappa(self.trace, self.costs, overlapped) if overlapped else self._kappa

    def _forecast_s(self, plan: Plan, kappa: float) -> float:
        """What an iteration should take."""
        assert self.trace is not None
        assert self.costs is not None
        forecast_s = iteration_by_kappa(plan, self.trace, self.costs)(kappa)
        return forecast_s - min(self._saved_s(plan), self.trace.other_s)

    def _saved_s(self, plan: Plan) -> float:
        """What ranks save that update their shards of decoupled tensors only."""
        return self._update_s * self._spared * plan.decoupled_part

    def _watch(self) -> None:
        """Look at each window of steps."""
        if self._seen % _WINDOW_STEPS:
            return
        self._steps = self._steps[-_WINDOW_STEPS:]
        window_s = statistics.median(s.done_s - s.begun_s for s in self._steps)
        self._drift_detector.add(window_s)
        self._windows_s = [*self._windows_s, window_s][-self._regret_windows :]

    @property
    def _now_s(self) -> float:
        """What an iteration by the installed plan takes now; 0 while that is not known."""
        known = len(self._windows_s) >= self._regret_windows and self._can_try_again
        # Where it begins to drift, all plans may take another time now: that is measured anew.
        if not known or self._drift_detector.is_drifting or not self._config.replan_threshold:
            return 0.0
        return statistics.median(self._windows_s)

    def _rivals(self, now_s: float) -> list[Candidate]:
        """Plans that took less in their trial than the installed one does now, the best first."""
        rivals = [
            c
            for c in self._tried
            if c.plan.digest != self.plan.digest and c.measured_s * (1 + _REGRET) < now_s
        ]
        return sorted(rivals, key=lambda c: c.measured_s)[:_MOST_RIVALS]

    def _return_to(self, rivals: Sequence[Plan], share: Share) -> None:
        """Try plans again beside the installed one: a disturbed trial may have dropped the best."""
        self._undecided = []
        self._eliminate([self.plan, *rivals], share)


def _measured_s(candidate: Candidate) -> float:
    return candidate.measured_s

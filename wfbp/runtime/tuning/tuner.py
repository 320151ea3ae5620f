"""The tuner: measure, plan, try, keep the fastest, plan again after a drift.

The training thread reports every step. Rounds end on all ranks together; rank 0 decides and shares
the decision, so that ranks agree on any machines and do not plan at once on shared cores.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import chain
from statistics import median
from typing import Any, Protocol, TypeVar

from wfbp.comm.cost_probe import codec_s
from wfbp.config import Config
from wfbp.core.cost import Costs, cheapest
from wfbp.core.fit import fit_kappa
from wfbp.core.plan import Plan
from wfbp.core.planners import ALL_REDUCE_SCHEDULES, AUTO
from wfbp.core.ranks import counted
from wfbp.core.timeline import IterationForecast, iteration_s, timeline
from wfbp.core.trace import Trace
from wfbp.core.types import Operation, TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.measuring import Visit
from wfbp.runtime.tuning.candidates import (
    auto_candidates,
    distinct,
    first_plan,
    fixed_candidates,
    reordered,
    sent_fastest,
)
from wfbp.runtime.tuning.profile import Profile, combine
from wfbp.runtime.tuning.trial import COLD_STEPS, Trial

log = logging.getLogger("wfbp")

T = TypeVar("T")
Json = dict[str, Any]


class Share(Protocol):
    """Returns on every rank the function's result on rank 0, in JSON's types."""

    def __call__(self, compute: Callable[[], T], /) -> T: ...


_WINDOW_STEPS = 20
_DRIFT_WINDOWS = 5
"""If this many windows in a row differ from the first one, it is a drift."""
_MIXED = "mixed"
"""Of plans whose groups are sent in different ways."""
_OF_EACH_WIRE = 3
"""If a trial has to choose how gradients are sent, so many plans of each are tried, and the
simplest."""
_MAX_TRIAL_FACTOR = 30
"""A trial takes at most ``trial_steps`` times this many steps."""


class TuningPhase(enum.Enum):
    """The state of a reducer's tuner; reports show the values."""

    WARM_UP = "warm-up"  # steps are counted, under a plan that needs no measurement
    PROFILE = "profile"  # compute is measured, with communication held back
    TRIAL = "trial"  # candidate plans run one after another
    INSTALLED = "installed"  # the chosen plan runs until times drift


class Tuner:
    """The plan of one optimizer over time. Used by the training thread.

    A step reads these attributes, adds its times to ``visit``, and calls :meth:`complete` after
    the last one of the visit; this may change ``plan``, on every rank at the same step.
    ``phase`` is for reports. ``profiling``: compute is measured, communication held back.
    ``measuring``: profile or trial. ``round_due``: all ranks now enter a round, by count of steps.
    ``wants_round``: this rank asks for one, because its iteration time has changed.
    """

    def __init__(
        self,
        config: Config,
        options: ReducerOptions,
        specs: Sequence[TensorSpec],  # in forward order as far as known
        num_ranks: int = 1,
        *,
        is_logger: bool = False,  # one rank is
    ) -> None:
        self._config = config
        self._options = options
        self._is_logger = is_logger
        self._decouples = options.decouples and options.schedule not in ALL_REDUCE_SCHEDULES
        self.operations = tuple(Operation) if self._decouples else (Operation.ALL_REDUCE,)
        """The collectives whose costs matter."""
        self._num_ranks = num_ranks
        # The part of a decoupled tensor's update that other ranks do.
        self._spared = 1.0 - 1.0 / num_ranks if options.decouples else 0.0
        self._update_s = 0.0
        self._kappa: float | None = None  # as the last trial showed it; until then, as measured
        self._steps_per_round = (config.trial_steps + 1) // 2
        self._num_joined: Counter[TensorSpec] = Counter()
        self._begin(specs)

    def add_tensors(self, specs: Sequence[TensorSpec]) -> None:
        """Begin again with these tensors too.

        A tensor that joins twice (it had no gradient in the profile) is kept for good: zeros cost
        less than beginning again and again.
        """
        self._num_joined.update(specs)
        self._begin([*specs, *self.plan.tensors])

    def use(self, options: ReducerOptions) -> None:
        """Begin again with other options."""
        self._options = options
        self._begin(self.plan.tensors)

    def _begin(self, specs: Sequence[TensorSpec]) -> None:
        self.trace: Trace | None = None
        # Of gradients, by their bytes before compression: for each way that a plan may send them.
        self._costs: dict[str, Costs] = {}
        self.message_costs: Costs | None = None
        self._incumbent: Plan | None = None  # the plan that was installed before a drift
        self._trial_s: dict[str, float] = {}  # of each plan in the latest trial, by digest
        plan = first_plan(self._options.schedule, specs, self._options.threshold_bytes)
        self._enter(TuningPhase.WARM_UP, plan, 0, self._config.warmup_steps)

    def _enter(
        self, phase: TuningPhase, plan: Plan, num_counted: int, num_cold: int = COLD_STEPS
    ) -> None:
        """Run a plan for some steps that count, after some with cold memory."""
        self.phase = phase
        self.plan = plan
        self.profiling = phase is TuningPhase.PROFILE
        self.measuring = phase in (TuningPhase.PROFILE, TuningPhase.TRIAL)
        self.installed = phase is TuningPhase.INSTALLED
        self.round_due = self.wants_round = False
        self.visit = Visit(num_cold, num_counted)
        self._prediction: IterationForecast | None = None
        self._usual_s = 0.0
        self._num_drifted = 0

    def complete(self) -> None:
        """The steps of the visit have run."""
        if self.phase is TuningPhase.WARM_UP:
            self._profile()
        elif self.phase is TuningPhase.PROFILE:
            self.round_due = True
        elif self.phase is TuningPhase.TRIAL:
            self._times_s.append([s.length_s for s in self.visit.steps])
            if not (_overlaps(self.plan) or self.plan.decoupled_part):
                self._computed_s += [s.computed_s for s in self.visit.steps]
            if len(self._times_s) < len(self._round):
                plan = self._round[len(self._times_s)]
                self._enter(TuningPhase.TRIAL, plan, self._steps_per_round)
            else:
                self.round_due = True
        else:
            self._watch()

    def _watch(self) -> None:
        """The drift rule: several windows in a row differ from the first one."""
        self.visit.left = _WINDOW_STEPS
        window_s = median(s.length_s for s in self.visit.steps)
        self._usual_s = self._usual_s or window_s
        change = abs(window_s - self._usual_s) / self._usual_s
        drifts = 0 < self._config.replan_threshold < change
        self._num_drifted = self._num_drifted + 1 if drifts else 0
        self.wants_round = self._num_drifted >= _DRIFT_WINDOWS

    def message(self) -> Json:
        """This rank's contribution to a round."""
        if not self.round_due:
            return {"wants_round": self.wants_round}
        if self.profiling:
            encoding_s = {}
            for wire in self._options.choices:
                _, encoded = self._sent_bytes(wire)
                encoding_s[wire] = sum(codec_s(codec, size) for codec, size in encoded.items())
            return {"profile": asdict(Profile.of(self.visit.steps)), "encoding_s": encoding_s}
        return {"times_s": self._times_s, "computed_s": self._computed_s}

    def decide(
        self,
        messages: Sequence[Json],
        measure: Callable[[], Costs],
        share: Share = lambda compute: compute(),
    ) -> None:
        """Conclude a round; this may change :attr:`plan`, on every rank alike.

        ``messages`` are each rank's :meth:`message`, in rank order. ``measure`` and ``share`` (of
        rank 0's result) are collectives.
        """
        if self.phase is TuningPhase.PROFILE:
            self._plan_anew(messages, measure, share)
        elif self.phase is TuningPhase.TRIAL:
            self._run_round(share(lambda: self._conclude_round(messages)))
        elif any(m.get("wants_round") for m in messages):
            self._log(
                "the iteration time has changed for good, to "
                f"{(self.measured_s or 0.0) * 1e3:.1f} ms: measuring and planning anew"
            )
            self._incumbent = self.plan
            self._profile()

    def _profile(self) -> None:
        num_steps = self._config.profile_steps
        self._log(f"measuring compute for {counted(num_steps, 'step')}, by {self.plan.summary}")
        self._enter(TuningPhase.PROFILE, replace(self.plan, overlap=False), num_steps)

    def _plan_anew(
        self, messages: Sequence[Json], measure: Callable[[], Costs], share: Share
    ) -> None:
        profiles = [Profile(**m["profile"]) for m in messages]
        kept = {spec for spec, times in self._num_joined.items() if times > 1}
        trace = combine(self.plan.tensors, profiles, kept)
        if trace is None:  # no rank had any gradient
            plan = replace(self.plan, overlap=True)
            self._enter(TuningPhase.WARM_UP, plan, 0, self._config.warmup_steps)
            return
        update_s = max(p.update_s for p in profiles)
        self._update_s = update_s / (1.0 - self._spared * self.plan.decoupled_part)
        trace = replace(trace, other_s=trace.other_s + self._update_s - update_s)
        nbytes = max(1, self.plan.total_bytes)
        self._log(
            f"measured compute of {counted(len(trace.tensors), 'tensor')}, {nbytes * 1e-6:.1f} MB: "
            f"forward {trace.forward_s * 1e3:.1f} ms, backward {trace.backward_s * 1e3:.1f}, "
            f"other {trace.other_s * 1e3:.1f}"
        )
        self.message_costs = costs = measure()
        packing_s = max(p.packing_s for p in profiles)
        self.trace = trace
        if self._kappa is not None:  # the network may be another one than that of the trial
            kappa = max(self._kappa, costs.kappa) if self.doubts_costs else self._kappa
            costs = replace(costs, kappa=kappa)
        for wire in self._options.choices:
            sent = costs.compressed(self._sent_bytes(wire)[0] / nbytes or 1.0)
            sent = sent.map(lambda curve: curve.packed(packing_s / nbytes))
            encoding_s = max(m["encoding_s"][wire] for m in messages)
            self._costs[wire] = sent.encoded(encoding_s / nbytes)
        if len(self._costs) > 1:
            ways = [self._costs[wire] for wire in self._options.choices]
            self._costs[_MIXED] = cheapest(ways, 2.0 * nbytes)
        self._run_round(share(self._first_round))

    def _first_round(self) -> Json:
        """The plans to run after the profile; on rank 0."""
        trace = self._measured
        schedule, threshold_bytes = self._options.schedule, self._options.threshold_bytes
        plans: list[Plan] = []
        ways = {wire: self._costs[wire] for wire in self._options.choices}
        for wire, costs in self._costs.items():
            if schedule == AUTO:
                most = None if len(self._costs) == 1 else _OF_EACH_WIRE
                each = auto_candidates(trace, costs, threshold_bytes, self._decouples, most)
            else:
                each = fixed_candidates(schedule, trace, costs, threshold_bytes)
                if len(self._costs) > 1:
                    each.sort(key=lambda plan: iteration_s(plan, trace, costs))
                    each = each[:_OF_EACH_WIRE]
            plans += [sent_fastest(p, ways if wire == _MIXED else {wire: costs}) for p in each]
        plans = distinct(plans)
        if (
            schedule == AUTO
            and self._incumbent
            and set(self._incumbent.tensors) == set(trace.specs)
        ):
            plans = distinct([reordered(self._incumbent, trace), *plans])
        if len(plans) > 1:
            max_steps = _MAX_TRIAL_FACTOR * self._config.trial_steps
            self._trial = Trial(plans, self._steps_per_round, max_steps)
            self._rounds_computed_s: list[list[float]] = []
            self._log(f"trial of {len(plans)} plans, of at most {counted(max_steps, 'step')}")
        return _answer(plans, None, {})

    def _conclude_round(self, messages: Sequence[Json]) -> Json:
        """The plans to run after a round, given each rank's times; on rank 0."""
        trial = self._trial
        by_plan = zip(*(m["times_s"] for m in messages), strict=True)
        trial.add_round([_slowest(ranks) for ranks in by_plan])
        measured = trial.measured
        texts = (
            f"{plan.summary} {seconds * 1e3:.1f} ms"
            for plan, seconds in measured
            if plan in trial.plans  # times of others are of earlier rounds
        )
        self._log(f"trial, round {trial.num_rounds}: {'; '.join(texts)}")
        trace = self._measured
        # Steps without overlap show how long compute takes now; the profile was only a few steps.
        slowdown = 1.0
        if computed_s := _slowest([m["computed_s"] for m in messages]):
            self._rounds_computed_s.append(computed_s)
        rounds = self._rounds_computed_s
        profiled_s = trace.forward_s + trace.backward_s + trace.other_s
        if rounds and profiled_s:
            slowdown = median(chain(*rounds)) / profiled_s
            trace = trace.slower(median(map(min, rounds)) / profiled_s)  # as the trial measures
        # Of plans that send gradients in one way, as the fastest does.
        overlapped = [
            (plan, seconds + self._saved_s(plan))
            for plan, seconds in measured
            if _overlaps(plan) and plan.wires == measured[0][0].wires
        ]
        costs = self._costs
        kappa = None
        if overlapped:
            kappa = fit_kappa(trace, costs[_way_of(overlapped[0][0])], overlapped)
            costs = _with_kappa(costs, kappa)
        forecasts_s = {
            plan.digest: max(
                iteration_s(plan, trace, costs[_way_of(plan)]) - self._saved_s(plan), 1e-9
            )
            for plan in trial.plans
        }
        winner = trial.narrow(forecasts_s)
        measured_s = {plan.digest: seconds for plan, seconds in measured}
        return _answer([winner] if winner else trial.plans, kappa, measured_s, slowdown)

    def _run_round(self, answer: Json) -> None:
        """Run the plans that rank 0 chose for a round, or install the only one."""
        self.trace = self._measured.slower(answer["slowdown"])
        plans = [Plan.from_json(plan) for plan in answer["plans"]]
        if answer["kappa"] is not None:
            self._kappa = answer["kappa"]
            self._costs = _with_kappa(self._costs, answer["kappa"])
        self._trial_s = answer["measured_s"]
        if len(plans) > 1:
            self._round = plans
            self._times_s: list[list[float]] = []
            self._computed_s: list[float] = []
            self._enter(TuningPhase.TRIAL, plans[0], self._steps_per_round)
            return
        self._incumbent = None
        self._enter(TuningPhase.INSTALLED, plans[0], _WINDOW_STEPS)
        assert self.predicted is not None
        tried = "" if self.measured_s is None else f"; {self.measured_s * 1e3:.1f} ms in its trial"
        self._log(
            f"installed {self.plan.summary}: predicted {self.predicted.iteration_s * 1e3:.1f} ms, "
            f"T/LB {self.predicted.ratio_to_lower_bound:.3f}{tried}"
        )

    @property
    def _measured(self) -> Trace:
        assert self.trace is not None
        return self.trace

    @property
    def costs(self) -> Costs | None:
        """Costs of gradients as the plan in use sends them, by their bytes before compression."""
        return self._costs.get(_way_of(self.plan))

    def _saved_s(self, plan: Plan) -> float:
        """Seconds of the update saved because ranks update only their shards."""
        return min(self._update_s * self._spared * plan.decoupled_part, self._measured.other_s)

    @property
    def doubts_costs(self) -> bool:
        """Whether to measure costs again: the iteration time changed, perhaps by the network."""
        return self._incumbent is not None

    @property
    def wire_bytes(self) -> int:
        """Bytes of all gradients as they are reduced."""
        return sum(spec.wire_bytes(wire) for spec, wire in self.wire_of_each.items())

    @property
    def wire_of_each(self) -> dict[TensorSpec, str]:
        """How the plan in use sends each tensor's gradient: as one of CODECS or WIRE_DTYPES, or
        empty."""
        plan = self.plan
        return {
            plan.tensors[k]: self._options.wire_of(plan.tensors[k], self._num_ranks, group.wire)
            for group in plan.groups[: plan.num_backward]
            for k in group.tensors
        }

    def _sent_bytes(self, wire: str) -> tuple[int, dict[str, int]]:
        return self._options.sent_bytes(self.plan.tensors, self._num_ranks, wire)

    @property
    def sent_as(self) -> dict[str, dict[str, int]]:
        """Elements and bytes of gradients, by what they are sent as."""
        found: dict[str, dict[str, int]] = {}
        for spec, wire in self.wire_of_each.items():
            sums = found.setdefault(wire or spec.real_dtype, {"elements": 0, "bytes": 0})
            sums["elements"] += spec.numel
            sums["bytes"] += spec.wire_bytes(wire)
        return found

    @property
    def predicted(self) -> IterationForecast | None:
        """The prediction for the plan in use; None before compute and network are measured."""
        costs = self.costs
        if self._prediction is None and self.trace is not None and costs is not None:
            other_s = self.trace.other_s - self._saved_s(self.plan)
            self._prediction = timeline(self.plan, replace(self.trace, other_s=other_s), costs)
        return self._prediction

    @property
    def measured_s(self) -> float | None:
        """Median iteration time of the plan: recently, in its trial, or in its first, cold step."""
        if steps := self.visit.steps:
            return median(s.length_s for s in steps)
        return self._trial_s.get(self.plan.digest, self.visit.cold_s)

    def _log(self, text: str) -> None:
        if self._is_logger:
            log.info("%s: %s", self._options.name, text)


def _way_of(plan: Plan) -> str:
    """The key of a plan's costs."""
    return plan.wires[0] if len(plan.wires) == 1 else _MIXED


def _overlaps(plan: Plan) -> bool:
    """Whether anything is sent while the model computes; one message leaves after backward."""
    return plan.overlap and len(plan.groups) > 1


def _with_kappa(costs: dict[str, Costs], kappa: float) -> dict[str, Costs]:
    return {wire: replace(each, kappa=kappa) for wire, each in costs.items()}


def _slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The seconds of each step on its slowest rank."""
    return [max(times) for times in zip(*ranks, strict=True)]


def _answer(
    plans: Sequence[Plan],
    kappa: float | None,
    measured_s: dict[str, float],
    slowdown: float = 1.0,
) -> Json:
    return {
        "plans": [plan.to_json() for plan in plans],
        "kappa": kappa,
        "measured_s": measured_s,
        "slowdown": slowdown,
    }

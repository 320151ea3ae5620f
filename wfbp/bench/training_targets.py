"""What the project promises of its iteration times, checked against a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from wfbp.bench.training_contestants import NO_COMMUNICATION, is_ddp, is_wfbp
from wfbp.bench.training_results import Figures, ModelResult

AUTO = "wfbp-auto"


@dataclass(frozen=True, slots=True)
class Target:
    """A figure with its bound.

    Args:
        model: it was measured on; "all" for a mean over models.
        what: in words.
        value: measured.
        limit: which the value may not exceed.
    """

    model: str
    what: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether the value is within its limit."""
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Ratios:
    """A contestant's median over those of others; None where those did not run."""

    to_ddp: float | None
    to_fastest: float | None
    to_fixed: float | None


def ratios(figures: dict[str, Figures], name: str) -> Ratios:
    """How a contestant compares with the best DDP, with the fastest of all that communicate, and
    with the best of wfbp's fixed schedules."""

    def to_best_of(group: Iterable[str]) -> float | None:
        medians = [figures[other].median_s for other in group]
        return figures[name].median_s / min(medians) if medians else None

    return Ratios(
        to_ddp=to_best_of(filter(is_ddp, figures)),
        to_fastest=to_best_of(other for other in figures if other != NO_COMMUNICATION),
        to_fixed=to_best_of(o for o in figures if is_wfbp(o) and o != AUTO),
    )


def prediction_error(result: ModelResult, name: str) -> float | None:
    """Measured over predicted iteration time, less one; None where there is no prediction."""
    predicted = result.report(name).get("predicted_iteration_s")
    figures = result.figures().get(name)
    if not predicted or figures is None:
        return None
    return figures.median_s / float(predicted) - 1


def targets(results: Sequence[ModelResult]) -> list[Target]:
    """Every promise that the run can judge."""
    found: list[Target] = []
    to_ddp_on_link: list[float] = []
    for result in results:
        figures = result.figures()
        if AUTO not in figures:
            continue
        ratio = ratios(figures, AUTO)
        if ratio.to_ddp is not None:
            found.append(Target(result.model, "auto over the best DDP", ratio.to_ddp, 1.0))
        if result.link == "none":
            if ratio.to_fastest is not None:
                found.append(
                    Target(result.model, "over the fastest of all", ratio.to_fastest, 1.08)
                )
            if ratio.to_fixed is not None:
                found.append(
                    Target(result.model, "over wfbp's best fixed schedule", ratio.to_fixed, 1.05)
                )
        if result.link == "1gbit":
            if ratio.to_ddp is not None:
                to_ddp_on_link.append(ratio.to_ddp)
            error = prediction_error(result, AUTO)
            if error is not None:
                found.append(Target(result.model, "away from its prediction", abs(error), 0.03))
            share = figures[AUTO].thread_share
            found.append(Target(result.model, "communication thread, of a core", share, 0.30))
    if to_ddp_on_link:
        found.append(Target("all", "auto over the best DDP, mean", fmean(to_ddp_on_link), 0.97))
    return found

"""What a recorded run says in one sentence, and what it cannot say yet."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from wfbp.cli.forecast import Forecast
from wfbp.cli.run_files import Run

NOTHING_TO_GAIN = 1.05
"""Up to this T/LB no schedule can gain what is worth the trouble."""
OFF = 1.5
"""A prediction that is wrong by this factor has another cause than noise."""
LATE = 0.1
"""Part of the iteration for which a rank waits for another one, from which on it matters."""

_NOT_YET = {
    "warm-up": "The run ended in its warm-up: compute, network, prediction, bound and interference "
    "are measured in the steps that would have followed.",
    "profile": "The run ended while compute was being measured (profile): the network, the "
    "prediction, the bound and interference are not known yet.",
    "trial": "The run ended while candidate plans were being tried (trial): the plan that stays, "
    "its exposed communication, T/LB and interference (kappa) are not known yet.",
}


def not_yet(phase: str) -> str:
    """What is not known because a run ended in that phase; empty where all is."""
    return _NOT_YET.get(phase, "")


def verdict(run: Run, forecasts: Sequence[Forecast]) -> str:
    """The main result of a run, in one sentence: the first that holds of a late rank, a wrong
    prediction, nothing to gain, and the gain by another schedule.

    ``forecasts`` are of every schedule on the run's measurements; empty where it measured too
    little.
    """
    first = run.ranks[0]
    measured_s, exposed_s = run.slowest("measured_iteration_s"), run.slowest("exposed_s")
    if measured_s is None:
        return f"Nothing to judge yet: {first.steps} steps, in the phase {first.phase}."
    if late := _late_rank(run):
        rank, for_rank, seconds = late
        return f"Rank {rank} waits {_ms(seconds)} of every iteration for rank {for_rank}."
    if first.phase != "installed" or exposed_s is None:
        return f"Still choosing ({first.phase}): {_ms(measured_s)} per iteration so far."
    predicted_s = first.figures["predicted_iteration_s"]
    if predicted_s and not 1 / OFF < measured_s / predicted_s < OFF:
        word = "slower" if measured_s > predicted_s else "faster"
        factor = max(measured_s / predicted_s, predicted_s / measured_s)
        return (
            f"Iterations are {factor:.1f} times {word} than predicted ({_ms(measured_s)} instead "
            f"of {_ms(predicted_s)}): does something else use the machine or the network?"
        )
    ratio = run.slowest("ratio_to_lower_bound")
    share = exposed_s / measured_s
    if ratio is not None and ratio <= NOTHING_TO_GAIN:
        bound = "Communication-bound" if share > LATE else "Compute-bound"
        return f"{bound}: T/LB {ratio:.2f}, nothing to gain by another schedule."
    sentence = (
        f"Training waits {_ms(exposed_s)} of {_ms(measured_s)} ({share:.0%}) for communication"
    )
    sentence += "" if ratio is None else f", T/LB {ratio:.2f}"
    best = min(forecasts, key=lambda f: f.iteration_s, default=None)
    if best is None or predicted_s is None or best.iteration_s > 0.98 * predicted_s:
        return f"{sentence}; no other schedule is predicted to be faster."
    gain_s = predicted_s - best.iteration_s
    return f"{sentence}; schedule {best.schedule} is predicted to save {_ms(gain_s)}."


def _late_rank(run: Run) -> tuple[int, int, float] | None:
    """Who waits, for whom, and how long: where one rank ends backward much later than another."""
    count = min(len(rank.iterations) for rank in run.ranks)
    if not count or len(run.ranks) < 2:
        return None
    closed_s = {
        rank.rank: statistics.median(i.closed_s for i in rank.iterations[-count:])
        for rank in run.ranks
    }
    length_s = max(statistics.median(i.done_s for i in r.iterations[-count:]) for r in run.ranks)
    early, late = min(closed_s, key=closed_s.__getitem__), max(closed_s, key=closed_s.__getitem__)
    seconds = closed_s[late] - closed_s[early]
    return (early, late, seconds) if seconds > LATE * length_s else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"

"""DeAR: groups closed by size, scattered in backward and gathered in the next forward."""

from __future__ import annotations

import math
import threading
from typing import Any

from wfbp.core.cost import Costs
from wfbp.core.plan import Plan
from wfbp.core.planners.baselines import DEFAULT_BYTES, ends_by_size
from wfbp.core.planners.partition import all_by, plan_of_phases
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

MIN_SEARCHED_BYTES = 2**20
MAX_SEARCHED_BYTES = 2**28
"""The search range for the default threshold; it scales with other thresholds."""
_SEED = 1
_ONE_AT_A_TIME = threading.Lock()
"""The library silences warnings process-wide while it suggests; rank threads must not overlap."""


class ThresholdSearch:
    """Bayesian optimisation of DeAR's threshold; equal times give equal proposals on all ranks.

    Proposes ``first_bytes`` first; searches 1/25 of it to about ten times as much.
    """

    def __init__(self, first_bytes: int = DEFAULT_BYTES) -> None:
        try:
            from bayes_opt import BayesianOptimization
            from bayes_opt.acquisition import ExpectedImprovement
        except ImportError as error:
            raise ImportError(
                "the search of dear's threshold needs the search extra: pip install 'wfbp[search]'"
            ) from error
        self._search: Any = BayesianOptimization(
            None,
            {"doublings": (0.0, math.log2(MAX_SEARCHED_BYTES / MIN_SEARCHED_BYTES))},
            acquisition_function=ExpectedImprovement(xi=0.01),
            random_state=_SEED,
            verbose=0,
            allow_duplicate_points=True,
        )
        self._scale = first_bytes / DEFAULT_BYTES
        self._first_s = 0.0
        self._proposed: dict[str, float] = {}

    def ask(self) -> int:
        """The threshold to try next, in bytes."""
        if self._first_s:
            with _ONE_AT_A_TIME:
                self._proposed = self._search.suggest()
        else:
            self._proposed = {"doublings": math.log2(DEFAULT_BYTES / MIN_SEARCHED_BYTES)}
        searched: float = MIN_SEARCHED_BYTES * 2.0 ** self._proposed["doublings"]
        return max(1, round(searched * self._scale))

    def tell(self, iteration_s: float) -> None:
        """Report the iteration time of the threshold last asked for."""
        self._first_s = self._first_s or iteration_s
        self._search.register(params=self._proposed, target=-iteration_s / self._first_s)


def dear(trace: Trace, costs: Costs, *, threshold_bytes: int = DEFAULT_BYTES) -> Plan:
    """One byte threshold for both phases: what is scattered together is gathered together.

    Published DeAR (Zhang et al., ICDCS 2023, section IV) issues an all-gather after the previous
    one, when forward reaches its layers. Here all are queued when forward starts, which is never
    later.
    """
    ends = ends_by_size(trace.backward_bytes, threshold_bytes)
    modes = all_by(Operation.REDUCE_SCATTER, len(trace.tensors))
    return plan_of_phases("dear", trace, modes, ends, ends)

"""The search for DeAR's threshold by Gaussian processes; the runtime tries fixed thresholds."""

from __future__ import annotations

import math
from typing import Any

from wfbp.core.planners.baselines import DEFAULT_BYTES

MIN_SEARCHED_BYTES = 2**20
MAX_SEARCHED_BYTES = 2**28
"""The search range for the default threshold; it scales with other thresholds."""
_SEED = 1


class ThresholdSearch:
    """Bayesian optimisation of DeAR's threshold, as published (section IV-C).

    Proposes ``first_bytes`` first; searches 1/25 of it to about ten times as much.
    """

    def __init__(self, first_bytes: int = DEFAULT_BYTES) -> None:
        from bayes_opt import BayesianOptimization
        from bayes_opt.acquisition import ExpectedImprovement

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
            self._proposed = self._search.suggest()
        else:
            self._proposed = {"doublings": math.log2(DEFAULT_BYTES / MIN_SEARCHED_BYTES)}
        searched: float = MIN_SEARCHED_BYTES * 2.0 ** self._proposed["doublings"]
        return max(1, round(searched * self._scale))

    def tell(self, iteration_s: float) -> None:
        """Report the iteration time of the threshold last asked for."""
        self._first_s = self._first_s or iteration_s
        self._search.register(params=self._proposed, target=-iteration_s / self._first_s)

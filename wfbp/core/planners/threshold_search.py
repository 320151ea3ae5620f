"""Bayesian search of DeAR's threshold: ask for the next one to try, tell what it took."""

from __future__ import annotations

import math
import threading
from typing import Any

from wfbp.core.planners.threshold import DEFAULT_BYTES

MIN_SEARCHED_BYTES = 2**20
MAX_SEARCHED_BYTES = 2**28
"""What is searched around the default threshold; around others it moves with them."""
_SEED = 1
_ONE_AT_A_TIME = threading.Lock()
"""The library silences warnings for the whole process while it suggests: where the threads of
several ranks overlap, each would put back what another had set."""


class ThresholdSearch:
    """A Gaussian process over the logarithm of the threshold, and expected improvement.

    The same answers lead to the same questions, on every rank.

    Args:
        first_bytes: asked first; the search goes from 1/25 of it to about ten times as much.

    Raises:
        ImportError: the ``search`` extra is not installed.

    Source:
        Zhang et al., "DeAR", ICDCS 2023, section IV-C.
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
        self._asked: dict[str, float] = {}

    def ask(self) -> int:
        """The threshold to try next, in bytes."""
        if self._first_s:
            with _ONE_AT_A_TIME:
                self._asked = self._search.suggest()
        else:
            self._asked = {"doublings": math.log2(DEFAULT_BYTES / MIN_SEARCHED_BYTES)}
        searched: float = MIN_SEARCHED_BYTES * 2.0 ** self._asked["doublings"]
        return max(1, round(searched * self._scale))

    def tell(self, iteration_s: float) -> None:
        """What an iteration took with the threshold last asked for."""
        self._first_s = self._first_s or iteration_s
        self._search.register(params=self._asked, target=-iteration_s / self._first_s)

"""Checks of numbers that come from outside, with the place named in the message."""

from __future__ import annotations

import math
from typing import Any


def number(place: str, value: Any) -> float:
    """``value`` as a finite float of at least 0.

    Args:
        place: where the value stands, for the message.
        value: anything.

    Raises:
        ValueError: not a number, negative, infinite or NaN.

    Example:
        >>> number("alpha_s", 3)
        3.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place}: expected a number, found {value!r}")
    try:
        result = float(value)
    except OverflowError:
        raise ValueError(f"{place}: the number is too large") from None
    if not (math.isfinite(result) and result >= 0):
        raise ValueError(f"{place}: expected a finite number of at least 0, found {value!r}")
    return result

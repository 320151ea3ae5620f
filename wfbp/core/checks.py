"""Checks of what comes from outside, with the place named in the message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


def one_of(place: str, value: str, known: Sequence[str], why: str = "") -> str:
    """``value``, where it is one of the known ones.

    Args:
        place: where the value stands, for the message.
        value: anything.
        known: what it may be.
        why: behind the message, why it may be nothing else.

    Raises:
        ValueError: it is none of them; which one is nearest, and all of them.

    Example:
        >>> one_of("op", "sum", ["sum", "max"])
        'sum'
    """
    if value in known:
        return value
    near = get_close_matches(value, known, 1) if isinstance(value, str) else []
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{place} is {value!r}{meant}; expected one of {', '.join(known)}{why}")


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

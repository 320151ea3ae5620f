"""Checks of input from outside; messages name the place."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 1e100
"""Sums and products of numbers up to here do not overflow."""

EXACT = 2**53
"""Whole numbers up to here are exact as floats."""


def one_of(place: str, value: str, known: Sequence[str], why: str = "") -> str:
    """``value`` if it is in ``known``; else ``ValueError`` with the place and the nearest name."""
    if value in known:
        return value
    near = get_close_matches(value, known, 1) if isinstance(value, str) else []
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise ValueError(f"{place} is {value!r}{meant}; expected one of {', '.join(known)}{why}")


def instance(place: str, value: Any, kind: type[T]) -> T:
    """``value`` if it is a ``dict`` or a ``list``, as ``kind`` says; else ``ValueError``."""
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        raise ValueError(f"{place}: expected {wanted}, found {type(value).__name__}")
    return value


def check_format(what: str, data: Any, form: str) -> None:
    """Raise ``ValueError`` unless a document is an object of that format."""
    actual = data.get("format") if isinstance(data, dict) else type(data).__name__
    if not isinstance(data, dict) or actual != form:
        raise ValueError(f"not {what}: expected format {form!r}, found {actual!r}")


def number(place: str, value: Any) -> float:
    """``value`` as a float from 0 to ``LARGEST``; else ``ValueError`` with its ``place``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{place}: expected a number, found {value!r}")
    if value > LARGEST:
        raise ValueError(f"{place}: too large; expected at most {LARGEST:g}")
    if not value >= 0:  # nor is NaN
        raise ValueError(f"{place}: expected a finite number of at least 0, found {value!r}")
    return float(value)


def whole(place: str, value: Any, least: int, most: int = EXACT) -> int:
    """``value`` if it is a whole number within limits; else ``ValueError`` with its ``place``."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{place}: expected a whole number from {least} to {most}, found {str(value)[:40]}"
        )
    return value


def unique(place: str, names: Sequence[str]) -> None:
    """Raise ``ValueError`` if a name is there twice."""
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise ValueError(f"{place}: names must be unique; found twice: {', '.join(twice)}")


def read_json(path: str | Path, parse: Callable[[Any], T]) -> T:
    """Parse a JSON file with ``parse``; each ``ValueError`` begins with the file's name."""
    text = Path(path).read_bytes()
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    try:
        return parse(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

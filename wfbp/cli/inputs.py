"""What commands share in reading their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def trace_argument(function: F) -> F:
    """The argument TRACE.json."""
    return click.argument("trace", metavar="TRACE.json", type=click.Path(path_type=str))(function)


def cost_option(function: F) -> F:
    """The option --cost COST.json."""
    return click.option(
        "--cost", "cost", metavar="COST.json", required=True, help="Costs, format wfbp-cost/1."
    )(function)


def json_option(function: F) -> F:
    """The option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(
        function
    )


def check_finite(what: str, value: float) -> None:
    """Refuse a result that inputs, each finite, have driven beyond all numbers.

    Raises:
        ValueError: ``value`` is infinite or NaN.

    Example:
        >>> check_finite("the iteration", 1.0)
    """
    if not math.isfinite(value):
        raise ValueError(f"{what} comes out as {value}: sizes, times or costs are too large")


def overflow_raises() -> AbstractContextManager[Any]:
    """Where NumPy would warn of an overflow and go on, raise ``FloatingPointError`` instead."""
    import numpy as np

    return np.errstate(over="raise")

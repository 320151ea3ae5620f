"""What commands share in reading their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from wfbp.core.cost import Costs
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

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


class FiniteRange(click.FloatRange):
    """A number within limits; NaN is within none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


LARGEST_S = 1e290
"""Beyond this, sums of times may leave the range of numbers."""


def load(trace: str, cost: str, factor: float = 1.0) -> tuple[Trace, Costs]:
    """A trace and costs that can be planned with.

    Args:
        trace: path of a wfbp-trace/1 file.
        cost: path of a wfbp-cost/1 file.
        factor: how many times the costs may be scaled up later.

    Raises:
        ValueError: one of them is wrong, or each figure is a number but their sums would not be.
        OSError: a file cannot be read.
    """
    model, costs = Trace.load(trace), Costs.load(cost)
    check_sums(trace, cost, model, costs, factor)
    return model, costs


def check_sums(trace: str, cost: str, model: Trace, costs: Costs, factor: float = 1.0) -> None:
    """Refuse figures each of which is a number while their sums would not be.

    Args:
        trace: where the trace comes from, for the message.
        cost: where the costs come from, for the message.
        model: the trace.
        costs: the costs.
        factor: how many times the costs may be scaled up later.

    Raises:
        ValueError: sums may leave the range of numbers.
    """
    nbytes = float(sum(model.backward_bytes))
    slowest_s = max(costs.of(operation)(nbytes) for operation in Operation)
    if not slowest_s * len(model.tensors) * factor * (1.0 + costs.kappa) < LARGEST_S:
        raise ValueError(
            f"{cost}: costs are too large: all bytes in one message take {slowest_s:g} s"
        )
    compute_s = model.forward_s + model.backward_s + model.other_s
    if not compute_s < LARGEST_S:
        raise ValueError(f"{trace}: times are too large: an iteration computes {compute_s:g} s")


def best(iterations_s: Sequence[float], num_groups: Sequence[int]) -> int:
    """The index of the shortest iteration; of those equal up to rounding, of the fewest groups.

    >>> best([2.0, 1.0, 1.0 + 1e-12], [1, 9, 4])
    2
    """
    limit_s = min(iterations_s) * (1 + 1e-9)
    found = [index for index, seconds in enumerate(iterations_s) if seconds <= limit_s]
    return min(found, key=lambda index: num_groups[index])

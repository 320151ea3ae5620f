"""Arguments that commands share, and the files that they name."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wfbp.core.checks import read_json
from wfbp.core.cost import Costs
from wfbp.core.trace import Trace
from wfbp.core.types import Operation

if TYPE_CHECKING:
    from wfbp.cli.run_files import Run

F = TypeVar("F", bound=Callable[..., Any])


EXAMPLES = Path(__file__).parent / "examples"
EXAMPLE_TRACES = EXAMPLES / "traces"
EXAMPLE_COSTS = EXAMPLES / "costs"


def model_arguments(function: F) -> F:
    """Add the argument TRACE, and the options --cost and --optimizer."""
    for decorate in (
        click.option(
            "--optimizer", metavar="NAME", help="Name of the optimizer, if the run has several."
        ),
        click.option(
            "--cost",
            "cost",
            metavar="COST",
            help="Costs: a file (wfbp-cost/1) or an example; a run has its own.",
        ),
        click.argument("trace", metavar="TRACE", type=click.Path(path_type=str)),
    ):
        function = decorate(function)
    return function


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")(
        function
    )


class IntegerRange(click.IntRange):
    name = "integer"  # in messages: "'two' is not a valid integer"


class FiniteRange(click.FloatRange):
    """A number within limits; NaN is within none."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


LARGEST_S = 1e290
"""Sums of larger times may overflow."""


@dataclass(frozen=True, slots=True)
class Model:
    """A trace and costs, the number of ranks that measured them, and the recorded run, if any."""

    trace: Trace
    costs: Costs
    measured_on: int | None = None
    run: Run | None = None


def load(trace: str, cost: str | None, factor: float = 1.0, optimizer: str | None = None) -> Model:
    """Load a trace and costs, which may be scaled by ``factor``, from files, examples or a run."""
    run: Run | None = None
    measured_on: int | None = None
    if Path(trace).is_dir():
        run, model, costs = _recorded(trace, optimizer)
        if cost is None:
            measured_on, cost = run.size, trace
        else:
            costs, measured_on = _costs(cost)
    else:
        context = click.get_current_context(silent=True)
        if optimizer is not None:
            raise click.UsageError("--optimizer needs the directory of a run", context)
        if cost is None:
            text = (
                "Missing option '--cost'. Only the directory of a run has costs of its own; give a "
                "file that wfbp probe wrote, or an example: --cost "
                + ", ".join(sorted(path.stem for path in EXAMPLE_COSTS.glob("*.json")))
            )
            raise click.UsageError(text, context)
        model = Trace.load(_file(trace, EXAMPLE_TRACES))
        costs, measured_on = _costs(cost)
    check_sums(trace, cost, model, costs, factor)
    return Model(model, costs, measured_on, run)


def _costs(name: str) -> tuple[Costs, int | None]:
    """The costs of a file or an example, and the number of ranks that measured them."""
    return read_json(_file(name, EXAMPLE_COSTS), _costs_and_ranks)


def _costs_and_ranks(document: Any) -> tuple[Costs, int | None]:
    costs = Costs.from_json(document)
    num_ranks = document.get("num_ranks")
    if num_ranks is not None and (type(num_ranks) is not int or num_ranks < 2):
        raise ValueError(f"num_ranks: expected a whole number from 2, found {num_ranks!r}")
    return costs, num_ranks


def _file(name: str, examples: Path) -> Path:
    """The user's file, or else the example of that name; ``ValueError`` if there is neither."""
    if Path(name).exists():
        return Path(name)
    known = {path.stem: path for path in examples.glob("*.json")}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(
            f"{name}: no such file, and no example{hint}; examples are {', '.join(sorted(known))}"
        )
    return known[name]


def _recorded(folder: str, optimizer: str | None) -> tuple[Run, Trace, Costs]:
    """The run of one of a directory's optimizers, with its trace and costs."""
    from wfbp.cli.run_files import load_runs

    runs = {run.name: run for run in load_runs(folder)}
    if optimizer is None and len(runs) > 1:
        raise ValueError(
            f"{folder}: the run has several optimizers; choose one with --optimizer: "
            f"{', '.join(runs)}"
        )
    name = optimizer or next(iter(runs))
    if name not in runs:
        raise ValueError(f"{folder}: no optimizer {name!r}; there are {', '.join(runs)}")
    first = runs[name].ranks[0]
    if first.trace is None or first.costs is None:
        raise ValueError(
            f"{folder}: the run ended after {first.steps} steps, in its {first.phase} phase, "
            "before model and network were measured; train for more steps"
        )
    trace = replace(first.trace, model=first.about["model"] or first.trace.model)
    return runs[name], trace, first.costs


def check_sums(trace: str, cost: str, model: Trace, costs: Costs, factor: float = 1.0) -> None:
    """Raise ``ValueError``, naming the files, if scaled times may overflow when added."""
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
    """The index of the shortest iteration; if equal up to rounding, of the fewest groups."""
    limit_s = min(iterations_s) * (1 + 1e-9)
    fast_enough = [index for index, seconds in enumerate(iterations_s) if seconds <= limit_s]
    return min(fast_enough, key=lambda index: num_groups[index])

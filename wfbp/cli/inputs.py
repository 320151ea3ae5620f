"""Arguments that commands share, and the files that they name."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wfbp.core.checks import one_of, read_json, whole
from wfbp.core.cost import Costs, cheapest
from wfbp.core.planners import PLANNERS
from wfbp.core.ranks import counted
from wfbp.core.trace import Trace
from wfbp.core.types import COMPRESSIONS
from wfbp.launcher.hosts import MOST_RANKS

if TYPE_CHECKING:
    from wfbp.cli.run_files import Run

_SAMPLE_BYTES = 16 << 20

F = TypeVar("F", bound=Callable[..., Any])

EXAMPLES = Path(__file__).parent / "examples"
EXAMPLE_TRACES = EXAMPLES / "traces"
EXAMPLE_COSTS = EXAMPLES / "costs"
NAMES = (
    f"Example traces: {', '.join(sorted(path.stem for path in EXAMPLE_TRACES.glob('*.json')))}. "
    f"Example costs: {', '.join(sorted(path.stem for path in EXAMPLE_COSTS.glob('*.json')))}."
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def model_arguments(function: F) -> F:
    """Add the argument TRACE, and the options --cost, --compression and --optimizer."""
    compression = click.option(
        "--compression",
        type=click.Choice([name for name in COMPRESSIONS if ":" not in name]),
        default="none",
        help="How gradients are sent. To encode them takes as long as on this machine.",
    )
    optimizer = click.option(
        "--optimizer", metavar="NAME", help="Name of the optimizer, if the run has several."
    )
    cost = click.option(
        "--cost",
        metavar="COST",
        help="Costs: a file (wfbp-cost/1) or an example; a run has its own.",
    )
    return click.argument("trace", metavar="TRACE")(cost(compression(optimizer(function))))


def _schedules(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    """Names of schedules, separated by commas, or ``all``: the callback of an option."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if names == ("all",):
        return tuple(PLANNERS)
    return tuple(one_of("--schedule", name, tuple(PLANNERS), ", all") for name in names)


schedule_option = partial(
    click.option, "--schedule", "names", callback=_schedules, metavar="NAME,..."
)


def compressed(costs: Costs, trace: Trace, compression: str, num_ranks: int, of_run: bool) -> Costs:
    """The costs of gradients by their bytes before compression. A trace has no shapes, so that only
    small tensors are known to be sent exactly."""
    if compression == "none":
        return costs
    if of_run:
        raise click.UsageError(
            "--compression needs --cost: a run's own costs are those of gradients as it sent them"
        )
    from wfbp.runtime.arguments import ReducerOptions

    options = ReducerOptions("single", 1, wire=COMPRESSIONS[compression])
    specs = [replace(spec, shape=(1, spec.numel)) for spec in trace.specs]
    nbytes = sum(spec.nbytes for spec in specs) or 1
    ways = []
    for wire in options.choices:
        sent_bytes, encoded = options.sent_bytes(specs, num_ranks, wire)
        encoding_s = sum(_codec_s_per_byte(codec) * size for codec, size in encoded.items())
        ways.append(costs.compressed(sent_bytes / nbytes or 1.0).encoded(encoding_s / nbytes))
    return cheapest(ways, 2.0 * nbytes)


@functools.cache
def _codec_s_per_byte(codec: str) -> float:
    from wfbp.comm.cost_probe import codec_s

    return codec_s(codec, _SAMPLE_BYTES) / _SAMPLE_BYTES


def load(
    trace: str, cost: str | None, optimizer: str | None
) -> tuple[Trace, Costs, int | None, Run | None]:
    """A trace, costs, how many ranks measured these, and the run, if they are of a recorded one.

    ``trace`` and ``cost`` name files or examples. ``trace`` may also name the directory of a run,
    which has its own costs.
    """
    run: Run | None = None
    if Path(trace).is_dir():
        run, model, costs = _recorded(trace, optimizer)
        measured_on: int | None = run.size
    elif optimizer is not None:
        raise click.UsageError("--optimizer needs the directory of a run")
    else:
        model = Trace.load(_file(trace, EXAMPLE_TRACES))
        if cost is None:
            raise click.UsageError(
                "Missing option '--cost'. Only the directory of a run has its own costs; give a "
                "file that wfbp probe wrote, or an example: --cost "
                + ", ".join(sorted(path.stem for path in EXAMPLE_COSTS.glob("*.json")))
            )
    if cost is not None:
        costs, measured_on = read_json(_file(cost, EXAMPLE_COSTS), _costs_and_ranks)
    return model, costs, measured_on, run


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


def _costs_and_ranks(document: Any) -> tuple[Costs, int | None]:
    """The costs of a document, and the number of ranks that measured them, if it has that."""
    costs = Costs.from_json(document)
    num_ranks = document.get("num_ranks")
    return costs, None if num_ranks is None else whole("num_ranks", num_ranks, 2, MOST_RANKS)


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
            f"{folder}: the run ended after {counted(first.steps, 'step')}, in its {first.phase} "
            "phase, before model and network were measured; train for more steps"
        )
    trace = replace(first.trace, model=first.about["model"] or first.trace.model)
    return runs[name], trace, first.costs


def best(iterations_s: Sequence[float], num_groups: Sequence[int]) -> int:
    """The index of the shortest iteration; if equal up to rounding, of the fewest groups."""
    limit_s = min(iterations_s) * (1 + 1e-9)
    fast_enough = [index for index, seconds in enumerate(iterations_s) if seconds <= limit_s]
    return min(fast_enough, key=lambda index: num_groups[index])

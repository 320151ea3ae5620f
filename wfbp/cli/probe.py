"""``wfbp probe``: measures collectives on this network, with the backend that trains."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wfbp.cli.inputs import json_option
from wfbp.cli.tables import print_table, size
from wfbp.config import Config, num_bytes
from wfbp.core.cost import Costs, PiecewiseCost, monotone_points
from wfbp.core.fit import fit_linear, goodness
from wfbp.core.types import Operation

if TYPE_CHECKING:
    from wfbp.comm.backend import Backend

LEAST_BYTES = 16
MOST_BYTES = 2**40

Curves = dict[Operation, PiecewiseCost]


def _size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """The value of ``--max-bytes``: 65536, 64K, 64KiB."""
    try:
        nbytes = num_bytes(text)
    except ValueError:
        nbytes = 0
    if not LEAST_BYTES <= nbytes <= MOST_BYTES:
        raise click.BadParameter(
            f"{text[:40]!r} is not a size of {LEAST_BYTES} bytes to 1 TiB, such as 64K or 100M"
        )
    return nbytes


@click.command("probe", short_help="Measure what messages cost among these ranks.")
@click.option(
    "--max-bytes",
    callback=_size,
    metavar="SIZE",
    default="64M",
    help="Largest message; ideally the size of the model's gradients.",
)
@click.option(
    "--seconds", type=click.FloatRange(0.0, 3600.0), default=6.0, help="Approximate time to spend."
)
@click.option(
    "--output",
    metavar="FILE",
    default="cost.json",
    help="File for the costs, in the format wfbp-cost/1.",
)
@click.option("--plot", metavar="FILE.html", help="Also write an interactive plot.")
@json_option
def command(max_bytes: int, seconds: float, output: str, plot: str | None, as_json: bool) -> None:
    """Measure all-reduce, reduce-scatter and all-gather among the ranks of this job.

    Start it like training: mpirun -np N wfbp probe. It times the backend that training uses, from
    4 bytes on. For wfbp plan and wfbp simulate, it writes the measured curves, and by how much
    messages slow compute down on the same core (kappa).
    """
    from wfbp.comm.mpi.mpi_backend import MpiBackend

    config = Config.from_environment()
    backend = MpiBackend(shared_memory=config.shared_memory, check_launcher=config.check_launcher)
    if backend.size == 1:
        raise click.UsageError(
            "a measurement needs at least two ranks; start it as: mpirun -np N wfbp probe"
        )
    _on_rank_0(backend, lambda: _check_outputs(output, plot))
    try:
        curves, kappa = measure(backend, max_bytes, seconds)
    except Exception as error:
        # The other ranks wait for this one.
        click.echo(f"wfbp probe: error: rank {backend.rank}: {error}", err=True)
        backend.abort(1)
        raise
    _on_rank_0(backend, lambda: _tell(curves, kappa, backend.size, output, plot, as_json))
    backend.close()


def measure(backend: Backend, max_bytes: int, seconds: float) -> tuple[Curves, float]:
    """Curves, and kappa without a spare core; collective, the same result on every rank.

    Times collectives for about ``seconds`` in all, and then some more for kappa.
    """
    from wfbp.comm.cost_probe import measure_cost, measure_kappa

    curves = {}
    for operation in Operation:
        budget_s = seconds / len(Operation)
        measured = measure_cost(backend, max_bytes, operation=operation, budget_s=budget_s)
        curves[operation] = PiecewiseCost(monotone_points(measured))
    return curves, measure_kappa(backend, max_bytes, curves[Operation.ALL_REDUCE])


def _on_rank_0(backend: Backend, act: Callable[[], None]) -> None:
    """Act on rank 0; if that fails, rank 0 raises the error and the others exit silently."""
    from wfbp.comm.waiting import wait

    failure: Exception | None = None
    if backend.rank == 0:
        try:
            act()
        except Exception as error:
            failure = error
    codes: list[bytes] = wait(backend.all_gather_bytes(b"failed" if failure else b""))
    if any(codes):
        raise failure or SystemExit(0)  # rank 0 sets the job's exit code


def _check_outputs(output: str, plot: str | None) -> None:
    """Check that files can be written later, without creating them."""
    if plot is not None:
        import wfbp.cli.figures  # noqa: F401 - raises if its extra is missing
    for path in filter(None, (output, plot)):
        file = Path(path).absolute()
        if not file.parent.is_dir():
            raise ValueError(f"{path}: no such directory: {file.parent}")
        if file.is_dir():
            raise ValueError(f"{path}: is a directory; name a file")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(f"{path}: may not be written")


def _tell(
    curves: Curves,
    kappa: float,
    num_ranks: int,
    output: str,
    plot: str | None,
    as_json: bool,
) -> None:
    """Write the files, and print how well a line fits each curve."""
    reduced, scattered, gathered = (curves[operation] for operation in Operation)
    costs = Costs(reduced, scattered, gathered, kappa)
    document = {**costs.to_json(), "num_ranks": num_ranks}
    Path(output).write_text(json.dumps(document, indent=1) + "\n")
    if plot is not None:
        from wfbp.cli.figures import Chapter, cost_curve, write_page

        text = "Points are medians of the slowest rank; dotted lines are alpha + beta * bytes."
        section = ("What a message costs", text, cost_curve(costs))
        write_page(plot, f"wfbp probe, {num_ranks} ranks", [Chapter(sections=[section])])
    fits, rows = {}, []
    for operation, curve in curves.items():
        line = fit_linear(curve.points)
        how = goodness(line, curve.points)
        beta = line.beta_s_per_byte
        fits[operation.value] = {**asdict(line), **asdict(how)}
        rows.append(
            (
                operation.value.replace("_", "-"),
                f"{line.alpha_s * 1e6:,.1f}",
                f"{beta * 1e9:.4f}",
                f"{1e-9 / beta:,.2f}" if beta > 0 else "-",
                f"{how.r_squared:.4f}",
                f"{how.max_relative_error:.0%}",
                size(curve.points[-1][0]),
            )
        )
    if as_json:
        click.echo(json.dumps({"ranks": num_ranks, "output": output, "fit": fits, "kappa": kappa}))
        return
    print_table(
        f"{num_ranks} ranks; fitted alpha + beta * bytes, and how well that fits",
        ("<collective", "alpha us", "beta ns/byte", "GB/s", "R2", "worst error", "largest"),
        rows,
        [
            "the file holds the measured points; the fitted line is off by up to the worst error",
            f"kappa {kappa:.2f}: "
            f"compute takes {1 + kappa:.2f} times as long beside messages on its core",
            f"written: {output}" + (f", {plot}" if plot else ""),
            f"what to do with it: wfbp plan resnet-50 --cost {output}",
        ],
    )

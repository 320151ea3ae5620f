"""``wfbp bench``: wfbp beside DDP, Horovod and plain MPI, on the ranks of this job."""

from __future__ import annotations

import json
import statistics

import click
import numpy as np

from wfbp.cli.inputs import json_option
from wfbp.cli.tables import milliseconds, print_table
from wfbp.core.ranks import counted
from wfbp.core.types import COMPRESSIONS
from wfbp.errors import WfbpError


@click.group("bench")
def command() -> None:
    """Compare wfbp with DDP and plain MPI. Start it like training: mpirun -np N wfbp bench ..."""


@command.command("training")
@click.option("--model", default="mlp", help="mlp, transformer, MODULE:FUNCTION.")
@click.option(
    "--contestants",
    default="none,mpi-per-tensor,ddp,ddp-best,wfbp-auto",
    help="Comma-separated; also horovod, wfbp-SCHEDULE and ddp-MIB.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=20)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option(
    "--compression",
    type=click.Choice(list(COMPRESSIONS)),
    default="none",
    help="How wfbp's contestants send gradients; the others send them as they are.",
)
@json_option
def training(
    model: str, contestants: str, rounds: int, device: str, compression: str, as_json: bool
) -> None:
    """Time training iterations, after checking that results agree.

    FUNCTION returns a model, whose model(*batch) is the loss, and a function that makes a batch
    from a seed. ddp has PyTorch's default buckets, ddp-best the fastest of three other sizes.
    """
    try:
        from wfbp.bench import training as benchmark
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise WfbpError("the benchmark needs PyTorch: pip install 'wfbp[torch]'") from error
    names = [name for name in contestants.split(",") if name]
    make = benchmark.model_named(model)
    for name in names:
        benchmark.check_contestant(name)
    results = benchmark.run_or_abort(make, names, rounds, device, compression)
    if results is None:
        return
    (base,) = (c for c in results if c.name == benchmark.REFERENCE)
    base_s = statistics.median(base.seconds)
    rows = []
    for contestant in results:
        first, middle, third = np.percentile(contestant.seconds, (25, 50, 75))
        cpu_s = statistics.median(contestant.cpu_seconds)
        cells = map(milliseconds, (middle, third - first, cpu_s))
        predicted_s = contestant.report.get("predicted_iteration_s")
        predicted = milliseconds(predicted_s) if predicted_s else "-"
        rows.append([contestant.name, *cells, predicted, f"{middle / base_s:.2f}"])
    about = benchmark.machine()
    if as_json:
        measured = {
            "seconds": {c.name: c.seconds for c in results},
            "cpu_seconds": {c.name: c.cpu_seconds for c in results},
            "reports": {c.name: c.report for c in results if c.report},
        }
        chosen = {"model": model, "device": device, "compression": compression}
        click.echo(json.dumps({**about, **chosen, **measured}))
        return
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    sent = "" if compression == "none" else f", wfbp sends {compression}"
    print_table(
        f"Iterations of {model}{sent}",
        ("<", "median ms", "IQR ms", "CPU ms", "predicted ms", f"of {benchmark.REFERENCE}"),
        rows,
        [f"{counted(about['ranks'], 'rank')}; {about['machine']}; {about['mpi']}; {versions}"],
    )

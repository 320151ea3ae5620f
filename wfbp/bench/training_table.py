"""Tables of the training benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from wfbp.bench.training_results import ContestantResult, ModelResult
from wfbp.bench.training_targets import prediction_error, ratios, targets

COLUMNS = (
    "median ms",
    "IQR",
    "kept",
    "of best DDP",
    "of fastest",
    "of best fixed",
    "predicted ms",
    "error",
    "CPU ms",
    "thread",
    "groups",
    "link MB",
)


def model_table(result: ModelResult) -> Table:
    """One model's contestants: times, ratios, wfbp's own prediction, CPU use, bytes."""
    return contestants_table(result, COLUMNS, _cells)


def contestants_table(
    result: ModelResult,
    columns: Sequence[str],
    cells: Callable[[ModelResult, ContestantResult], Sequence[str]],
) -> Table:
    """A row for each contestant of one model."""
    where = "shared memory" if result.link == "none" else f"{result.link}/s link"
    table = Table(
        title=f"{result.title}: {result.num_tensors} tensors, {result.num_bytes / 1e6:.1f} MB, "
        f"{result.num_ranks} ranks, {where}"
    )
    table.add_column("contestant")
    for name in columns:
        table.add_column(name, justify="right")
    for contestant in result.contestants:
        table.add_row(contestant.name, *cells(result, contestant))
    return table


def _cells(result: ModelResult, contestant: ContestantResult) -> list[str]:
    all_figures = result.figures()
    name = contestant.name
    figures = all_figures.get(name)
    total = sum(len(block.iterations_s) for block in contestant.blocks)
    if figures is None:
        return ["-", "-", f"0/{total}"]
    ratio = ratios(all_figures, name)
    report = contestant.report
    return [
        _milliseconds(figures.median_s),
        _milliseconds(figures.iqr_s),
        f"{figures.num_kept}/{total}",
        _number(ratio.to_ddp, ".3f"),
        _number(ratio.to_fastest, ".3f"),
        _number(ratio.to_fixed, ".3f"),
        _milliseconds(report.get("predicted_iteration_s")),
        _number(prediction_error(result, name), "+.1%"),
        _milliseconds(figures.cpu_s),
        _number(figures.thread_share or None, ".0%"),
        _groups(report),
        _number(None if figures.sent_bytes is None else figures.sent_bytes / 1e6, ".1f"),
    ]


def _groups(report: dict[str, object]) -> str:
    """Such as ``12 oasr``, or ``120 wfbp, late`` for a plan without overlap."""
    if report.get("num_groups") is None:
        return ""
    late = "" if report.get("overlap", True) else ", late"
    return f"{report['num_groups']} {report.get('schedule')}{late}"


def target_table(results: Sequence[ModelResult]) -> Table:
    """What was promised, and whether it holds."""
    table = Table(title="targets")
    for name in ("model", "what", "measured", "at most", ""):
        table.add_column(name)
    for target in targets(results):
        style = {"met": "green", "missed": "red"}.get(target.verdict, "yellow")
        verdict = f"[{style}]{target.verdict}[/]"
        table.add_row(
            target.model, target.what, f"{target.value:.3f}", f"{target.limit:g}", verdict
        )
    return table


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)

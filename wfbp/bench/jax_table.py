"""Tables of the JAX benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from wfbp.bench.jax_contestants import NO_COMMUNICATION
from wfbp.bench.training_results import ContestantResult, Figures, ModelResult
from wfbp.bench.training_table import contestants_table

AUTO = "wfbp-auto"
COLUMNS = ("median ms", "IQR", "kept", "of best peer", "exposed ms", "CPU ms", "plan", "link MB")


def best_peer(figures: dict[str, Figures]) -> float | None:
    """The least median of those that are not wfbp and communicate; None where none ran."""
    peers = [f.median_s for n, f in figures.items() if not n.startswith("wfbp-")
             and n != NO_COMMUNICATION]  # fmt: skip
    return min(peers, default=None)


def model_table(result: ModelResult) -> Table:
    """One model's contestants: times, ratios, what communication adds, CPU use, bytes."""
    return contestants_table(result, COLUMNS, _cells)


def _cells(result: ModelResult, contestant: ContestantResult) -> list[str]:
    all_figures = result.figures()
    figures = all_figures.get(contestant.name)
    total = sum(len(block.iterations_s) for block in contestant.blocks)
    if figures is None:
        return ["-", "-", f"0/{total}"]
    best, alone = best_peer(all_figures), all_figures.get(NO_COMMUNICATION)
    report = contestant.report
    plan = f"{report['num_groups']} {report['schedule']}" if report.get("num_groups") else ""
    return [
        f"{figures.median_s * 1e3:.1f}",
        f"{figures.iqr_s * 1e3:.1f}",
        f"{figures.num_kept}/{total}",
        "" if best is None else f"{figures.median_s / best:.3f}",
        "" if alone is None else f"{(figures.median_s - alone.median_s) * 1e3:.1f}",
        f"{figures.cpu_s * 1e3:.1f}",
        plan,
        "" if figures.sent_bytes is None else f"{figures.sent_bytes / 1e6:.1f}",
    ]


def target_table(results: Sequence[ModelResult]) -> Table:
    """Whether ``auto`` is at most the fastest peer."""
    table = Table(title="targets")
    for name in ("model", "what", "measured", "at most", ""):
        table.add_column(name)
    for result in results:
        figures = result.figures()
        best = best_peer(figures)
        if best is None or AUTO not in figures:
            continue
        ratio = figures[AUTO].median_s / best
        verdict = "met" if ratio <= 1 else "missed"
        table.add_row(
            result.model,
            "auto over the fastest peer",
            f"{ratio:.3f}",
            "1",
            verdict if result.complete else "undecided",
        )
    return table

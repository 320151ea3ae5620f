"""The tables of docs/benchmarks/validation.md, each by its name, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.benchmarks.scaling import WORKERS
from tests.benchmarks.validation import claims
from tests.benchmarks.validation.measured import (
    CLUSTERS,
    KAPPAS,
    Fit,
    Prediction,
    fit,
    fit_line,
    mean_absolute_error,
    predict,
    rms,
)
from tests.benchmarks.validation.ratios import (
    BOUNDS,
    EXPECTED_BOUNDS,
    EXPECTED_RATIOS,
    RATIOS,
    clusters,
    equal_tensors,
    mean_and_largest,
    models,
    over_the_bound,
    over_the_optimum,
    random_instances,
)
from wfbp.core.cost import LinearCost


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def measured() -> str:
    """MG-WFBP predicted from the two other columns, row by row."""

    def cells(p: Prediction) -> tuple[str, ...]:
        return (
            f"{p.cluster}, {p.model}",
            *(f"{error:+.1%}" for error in p.fit_errors),
            f"{p.measured_s:.4f}",
            f"{p.predicted_s:.4f}",
            f"{p.error:+.1%}",
            f"{p.measured_s / p.lower_bound_s:.3f}",
            f"{p.predicted_s / p.lower_bound_s:.3f}",
        )

    header = ("network, model", "fit of WFBP", "fit of single", "MG-WFBP measured s")
    others = ("predicted s", "error", "T/LB measured", "T/LB predicted")
    return markdown(
        (*header, *others), [cells(p) for c in CLUSTERS for p in predict(c, fit(c).costs)]
    )


def fitted() -> str:
    """What was fitted, with interference and without, beside the figures published apart."""
    lines = []
    for cluster, published in zip(CLUSTERS, ("10GbE-16", "IB-16"), strict=True):
        known = clusters()[published]
        for what, found in (
            (cluster, fit(cluster)),
            (f"{cluster}, kappa held at 0", fit(cluster, kappas=(0.0,))),
            (f"{cluster}, published figures", Fit(known, rms(cluster, known))),
        ):
            line = found.costs.all_reduce
            assert isinstance(line, LinearCost)
            predictions = predict(cluster, found.costs)
            lines.append(
                (
                    what,
                    f"{line.alpha_s * 1e6:.0f} us",
                    f"{line.beta_s_per_byte * 1e9:.3f} ns",
                    f"{found.costs.kappa:.2f}",
                    f"{found.rms:.1%}",
                    f"{mean_absolute_error(predictions):.1%}",
                    f"{max(predictions, key=lambda p: abs(p.error)).error:+.1%}",
                )
            )
    header = ("network", "alpha", "beta per byte", "kappa", "rms of the fit")
    return markdown((*header, "mean absolute error of MG-WFBP", "worst"), lines)


def kappas() -> str:
    """How much the two columns know about kappa."""
    lines = []
    for kappa in KAPPAS[:9:2]:
        cells = [f"{kappa:.2f}"]
        for cluster in CLUSTERS:
            found = fit_line(cluster, kappa)
            error = mean_absolute_error(predict(cluster, found.costs))
            cells += [f"{found.rms:.1%}", f"{error:.1%}"]
        lines.append(cells)
    columns = (f"{c}: {what}" for c in CLUSTERS for what in ("rms of the fit", "error of MG-WFBP"))
    return markdown(("kappa", *columns), lines)


def optimum() -> str:
    """Iteration time over that of the exact all-reduce plan."""
    return _beside(over_the_optimum, RATIOS, EXPECTED_RATIOS)


def bound() -> str:
    """T / LB."""
    return _beside(over_the_bound, BOUNDS, EXPECTED_BOUNDS)


def _beside(
    compute: Callable[..., dict[str, list[float]]],
    columns: Sequence[str],
    expected: dict[str, dict[str, str]],
) -> str:
    """Ours as mean/largest, and in brackets what was expected."""
    lines = []
    for name, known in expected.items():
        found = compute(clusters()[name])
        cells = (
            mean_and_largest(found[c]) + (f" ({known[c]})" if c in known else "") for c in columns
        )
        lines.append((name, *cells))
    return markdown(("cluster", *columns), lines)


def greedy() -> str:
    """MG-WFBP's rule on small random instances, and on equal tensors."""
    found = random_instances()
    share = sum(ratio < 1 + 1e-9 for ratio in found) / len(found)
    lines = [
        (f"{len(found)} random instances of 2 to 8 tensors", f"{share:.0%}", f"{max(found):.3f}")
    ]
    lines += [
        (f"{n} equal tensors, 0.99 alpha apart", "-", f"{equal_tensors(n):.3f}")
        for n in (4, 16, 64)
    ]
    return markdown(("instances", "optimal", "worst over the optimum"), lines)


def oasr() -> str:
    """Iteration time saved by OASR over MG-WFBP."""
    names = [trace.model for trace in models()]
    lines = [
        (cluster, *(f"{v:.1%}" for v in values), f"{sum(values) / len(values):.1%}")
        for cluster, values in claims.oasr_over_mgwfbp().items()
    ]
    return markdown(("cluster", *names, "mean"), lines)


def dear() -> str:
    """Speed-up of DeAR with search, mean/largest over the models."""
    lines = []
    for name, costs in claims.sixty_four_workers().items():
        found = claims.dear_over_all_reduce(costs)
        lines.append((name, *(f"{sum(v) / len(v):.0%}/{max(v):.0%}" for v in found.values())))
    return markdown(("64 workers", *(f"over {n}" for n in claims.BASELINES)), lines)


def ipart() -> str:
    """Speed-up of iPart at 72 nodes, over the default parameter server / over layer by layer."""
    costs = {name: claims.seventy_two_nodes(name, 16) for name in ("10GbE-16", "IB-16")}
    lines = []
    for trace in models():
        gains = [claims.ipart_gains(trace, c) for c in costs.values()]
        gains.append(claims.largest_ipart_gain(trace, costs["10GbE-16"]))
        columns = [f"{g.over_whole:+.0%} / {g.over_layers:+.0%}" for g in gains]
        lines.append((trace.model, *columns, f"{gains[-1].slower:.2g}"))
    header = ("model", *(f"links of {name}" for name in costs))
    return markdown((*header, "at the best speed of links", "10GbE-16, times slower"), lines)


def ring() -> str:
    """Speed-up over one worker on a ring."""
    return _scaling("ring")


def tree() -> str:
    """Speed-up over one worker over two trees."""
    return _scaling("tree")


def _scaling(algorithm: str) -> str:
    rows = claims.scaling(algorithm)
    by_case = {(r.model, r.workers, r.schedule): r.speedup for r in rows}
    lines = [
        (f"{model}, {workers}", *(f"{by_case[model, workers, s]:,.1f}" for s in claims.SCALED))
        for model in dict.fromkeys(r.model for r in rows)
        for workers in WORKERS[::3]  # the test looks at all
    ]
    return markdown(("model, workers", *claims.SCALED), lines)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        measured, fitted, kappas, optimum, bound, greedy, oasr, dear, ipart, ring, tree,
    )
}  # fmt: skip
"""In the order of the page."""

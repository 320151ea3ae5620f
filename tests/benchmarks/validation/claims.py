"""What publications claim, and what the model says of the nearest set-up at hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tests.benchmarks.scaling import WORKERS
from tests.benchmarks.validation.measured import CLUSTERS, fit
from tests.benchmarks.validation.ratios import clusters, models, predicted
from wfbp.core.cost import Costs
from wfbp.core.trace import Trace
from wfbp.sim.scaling import scale
from wfbp.sim.sweep import SweepRow, sweep

OASR_CLUSTERS = ("10GbE-16", "10GbE-32", "10GbE-64", "IB-16", "IB-32", "IB-64")
BASELINES = ("layerwise", "threshold", "mgwfbp")
SCALED = ("layerwise", "single", "mgwfbp", "oasr", "hybrid")


def oasr_over_mgwfbp() -> dict[str, list[float]]:
    """Iteration time saved by OASR over MG-WFBP, for every model, by cluster."""
    found = {}
    for name in OASR_CLUSTERS:
        costs = clusters()[name]
        found[name] = [
            1 - predicted("oasr", t, costs).iteration_s / predicted("mgwfbp", t, costs).iteration_s
            for t in models()
        ]
    return found


def sixty_four_workers() -> dict[str, Costs]:
    """Clusters of 64: as published, and the links fitted to measurements of 16 workers."""
    found = {name: clusters()[name] for name in ("10GbE-64", "IB-64")}
    for name in CLUSTERS:
        fitted = fit(name).costs
        found[f"{name}, fitted, 64"] = scale(fitted, 64, measured_on=16)
    return found


def dear_over_all_reduce(costs: Costs) -> dict[str, list[float]]:
    """Speed-up of DeAR with search, T_baseline / T_DeAR - 1, for every model, by baseline."""
    traces = models()
    decoupled_s = [predicted("dear_search", trace, costs).iteration_s for trace in traces]
    return {
        name: [
            predicted(name, trace, costs).iteration_s / seconds - 1
            for trace, seconds in zip(traces, decoupled_s, strict=True)
        ]
        for name in BASELINES
    }


@dataclass(frozen=True)
class ServerGains:
    """Speed-up of iPart over the default parameter server and over layer by layer.

    Args:
        slower: how many times slower the links are than those of the cluster named.
    """

    slower: float
    over_whole: float
    over_layers: float


def ipart_gains(trace: Trace, costs: Costs, slower: float = 1.0) -> ServerGains:
    """On links that are so many times slower."""
    costs = Costs(costs.all_reduce.scaled(slower))
    whole, layers, greedy = (
        predicted(name, trace, costs).iteration_s for name in ("ps", "ps_layerwise", "ipart")
    )
    return ServerGains(slower, whole / greedy - 1, layers / greedy - 1)


def largest_ipart_gain(trace: Trace, costs: Costs) -> ServerGains:
    """On links of the speed at which it gains most over the default parameter server."""
    speeds = [2.0 ** (k / 2) for k in range(-8, 9)]
    found = [ipart_gains(trace, costs, slower) for slower in speeds]
    return max(found, key=lambda gains: gains.over_whole)


def seventy_two_nodes(cluster: str, measured_on: int) -> Costs:
    """A published cluster's links under 72 nodes that each serve 1/72 of every tensor.

    Nodes push to and pull from all others directly, so that a start-up does not add up over a
    ring; that of the whole exchange grows with the logarithm.
    """
    return scale(clusters()[cluster], 72, "halving_doubling", measured_on=measured_on)


@cache
def scaling(algorithm: str) -> list[SweepRow]:
    """ResNet-50 and DenseNet-201 from 4 to 2048 workers over the links of 10GbE-16."""
    traces = [t for t in models() if t.model in ("ResNet-50", "DenseNet-201")]
    return sweep(traces, clusters()["10GbE-16"], WORKERS, SCALED, algorithm, measured_on=16)

"""Scales the cost of one link to collectives over many workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wfbp.core.checks import one_of
from wfbp.core.cost import CostModel, Costs, LinearCost, PiecewiseCost
from wfbp.core.fit import fit_linear
from wfbp.core.types import Operation


@dataclass(frozen=True, slots=True)
class Link(LinearCost):
    """One hop between two workers: alpha and beta."""


@dataclass(frozen=True, slots=True)
class Node:
    """A host of ``workers`` (at least 1) with one network link.

    ``source`` is the cost of a link between two of its workers, or costs over ``measured_on`` of
    them.
    """

    workers: int
    source: Link | Costs
    measured_on: int = 2

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers of a node: expected at least 1, found {self.workers}")


Work = tuple[float, float]
"""Hops of the slowest worker, and how many times the bytes its busiest link carries."""


def _ring(workers: int) -> Work:
    """P - 1 steps of reduce-scatter and as many of all-gather, each of 1/P of the bytes."""
    return 2 * (workers - 1), 2 * (workers - 1) / workers


def _tree(workers: int) -> Work:
    """Two pipelined trees with half of the bytes each (Sanders et al., Parallel Computing 2009)."""
    return 2 * math.ceil(math.log2(workers)), 2 if workers > 1 else 0


def _halving_doubling(workers: int) -> Work:
    """Recursive halving and doubling (Thakur et al., IJHPCA 2005); 2 hops more off powers of 2."""
    depth = workers.bit_length() - 1
    extra = 0 if workers == 2**depth else 2
    return 2 * depth + extra, 2 * (2**depth - 1) / 2**depth + extra


FLAT: Mapping[str, Callable[[int], Work]] = MappingProxyType(
    {"ring": _ring, "tree": _tree, "halving_doubling": _halving_doubling}
)
"""Algorithms whose links are all alike, by name."""

ALGORITHMS = (*FLAT, "hierarchical")
"""All algorithms, the flat ones and rings within and between hosts."""


CHUNK_BYTES = 3 << 19
"""Chunk of a two-level collective, half a window of ``comm.mpi.transfers.Chunking``."""
CONTROL_EXCHANGES = 60
"""Control exchanges from start to the first plan; docs/benchmarks/hosts.md counts 27 to 57."""
CONTROL_BYTES = 512
"""Size of a control message; the mean was 180 to 360."""


def scale(
    source: Link | Costs,
    workers: int,
    algorithm: str = "ring",
    *,
    measured_on: int = 2,
    node: Node | None = None,
) -> Costs:
    """The costs of a channel over ``workers`` workers.

    With h hops and the v-fold bytes on the busiest link, an all-reduce costs ``h * alpha + v * beta
    * m``:

    ==================  =============================  ==========================
    ring                h = 2 (P - 1)                  v = 2 (P - 1) / P
    tree                h = 2 ceil(log2 P)             v = 2
    halving_doubling    h = 2 log2 P                   v = 2 (P - 1) / P
    hierarchical        h = 2 (N - 1) between hosts    v = 2 (N - 1) / N between, or
                        2 (G - 1) within               2 (G - 1) / G within
    ==================  =============================  ==========================

    If P is no power of two, halving-doubling uses the next lower one, 2 more hops and 2 more
    messages. ``hierarchical`` reduces within each of N = P / G hosts, then between hosts, whose
    workers share one link, then gathers within, chunk by chunk: what wfbp itself does. The slower
    level limits.

    Args:
        source: the cost of one link; or the costs over ``measured_on`` workers by the same
            algorithm (``hierarchical``: one worker per host). Over other numbers of workers their
            curves become straight lines, because the change of a curve's shape with P is not known.
        workers: P, at least 1.
        algorithm: one of :data:`ALGORITHMS`.
        measured_on: number of workers of measured costs, at least 2.
        node: for ``hierarchical``: the workers of a host, and the costs between them.

    Returns:
        The costs; one worker costs nothing.

    Raises:
        ValueError: no such algorithm, too few workers, or a node is missing or unused.

    Example:
        >>> link = Link(alpha_s=30e-6, beta_s_per_byte=4e-10)
        >>> scale(link, 16).all_reduce
        LinearCost(alpha_s=0.0009, beta_s_per_byte=7.5e-10)
        >>> scale(scale(link, 16), 64, measured_on=16) == scale(link, 64)
        True
    """
    one_of("algorithm", algorithm, ALGORITHMS)
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, found {workers}")
    if (algorithm == "hierarchical") is not (node is not None):
        raise ValueError(f"node: {'missing' if node is None else 'not used'} for {algorithm!r}")
    if node:
        within = min(node.workers, workers)
        return _pipelined(
            scale(source, -(-workers // within), measured_on=measured_on),
            scale(node.source, within, measured_on=node.measured_on),
        )
    hops, volume = FLAT[algorithm](workers)
    if isinstance(source, Link):
        return Costs(LinearCost(hops * source.alpha_s, volume * source.beta_s_per_byte))
    if measured_on < 2:
        raise ValueError(f"measured_on: expected at least 2 workers, found {measured_on}")
    if workers == measured_on:
        return source
    measured_hops, measured_volume = FLAT[algorithm](measured_on)

    def carried(curve: CostModel) -> LinearCost:
        line = _line(curve)
        return LinearCost(
            line.alpha_s * hops / measured_hops, line.beta_s_per_byte * volume / measured_volume
        )

    return source.map(carried)


def _pipelined(between: Costs, within: Costs) -> Costs:
    """Costs of two levels that work on different chunks at the same time."""

    def both(operation: Operation) -> CostModel:
        one, other = between.of(operation), within.of(operation)
        if isinstance(one, LinearCost) and isinstance(other, LinearCost):
            return LinearCost(
                one.alpha_s + other.alpha_s, max(one.beta_s_per_byte, other.beta_s_per_byte)
            )
        curves = [curve for curve in (one, other) if isinstance(curve, PiecewiseCost)]
        sizes = sorted({size for curve in curves for size, _ in curve.points})
        points = []
        for size in sizes:
            faster_s, slower_s = sorted((one(size), other(size)))
            points.append((size, slower_s + faster_s / max(1.0, size / CHUNK_BYTES)))
        return PiecewiseCost(tuple(points))

    return Costs(
        both(Operation.ALL_REDUCE),
        both(Operation.REDUCE_SCATTER),
        both(Operation.ALL_GATHER),
        between.kappa,
    )


def control_s(link: Link, workers: int) -> float:
    """Upper estimate of the seconds for control messages, from a job's start to its first plan.

    Every rank sends every other rank one message per exchange. The estimate is for one message
    after another. Later steps have no control messages.

    Example:
        >>> round(control_s(Link(alpha_s=1e-6, beta_s_per_byte=0.0), 2048), 2)
        0.12
    """
    return CONTROL_EXCHANGES * (workers - 1) * link(CONTROL_BYTES)


def link_of(costs: Costs) -> Link:
    """The line of all-reduce, taken as the cost of one link."""
    line = _line(costs.all_reduce)
    return Link(line.alpha_s, line.beta_s_per_byte)


def _line(curve: CostModel) -> LinearCost:
    return fit_linear(curve.points) if isinstance(curve, PiecewiseCost) else curve

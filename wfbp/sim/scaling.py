"""Scales the cost of one link to collectives over many workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wfbp.core.cost import CostModel, Costs, LinearCost, PiecewiseCost
from wfbp.core.fit import fit_linear


@dataclass(frozen=True, slots=True)
class Link(LinearCost):
    """One hop between two workers: alpha and beta."""


@dataclass(frozen=True, slots=True)
class Node:
    """A host of ``workers`` (at least 1) with one network link; ``link`` connects two of them."""

    workers: int
    link: Link

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers of a node: expected at least 1, found {self.workers}")


@dataclass(frozen=True, slots=True)
class _Work:
    """Hops of the slowest worker, and its share of the bytes: between hosts, and within one."""

    hops: float
    volume: float
    inner_hops: float = 0.0
    inner_volume: float = 0.0


def _ring(workers: int) -> _Work:
    """P - 1 steps of reduce-scatter and as many of all-gather, each of 1/P of the bytes."""
    return _Work(2 * (workers - 1), 2 * (workers - 1) / workers)


def _tree(workers: int) -> _Work:
    """Two pipelined trees with half of the bytes each (Sanders et al., Parallel Computing 2009)."""
    depth = math.ceil(math.log2(workers))
    return _Work(2 * depth, 2 if workers > 1 else 0)


def _halving_doubling(workers: int) -> _Work:
    """Recursive halving and doubling (Thakur et al., IJHPCA 2005); 2 hops more off powers of 2."""
    depth = workers.bit_length() - 1
    power = 2**depth
    extra = 0 if workers == power else 2
    return _Work(2 * depth + extra, 2 * (power - 1) / power + extra)


FLAT: Mapping[str, Callable[[int], _Work]] = MappingProxyType(
    {"ring": _ring, "tree": _tree, "halving_doubling": _halving_doubling}
)
"""Algorithms whose links are all alike, by name."""

ALGORITHMS = (*FLAT, "hierarchical")
"""All algorithms, the flat ones and rings within and between hosts."""


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
    hierarchical        h = 2 (N - 1) between hosts    v = 2 (N - 1) / N between,
                        2 (G - 1) within               2 (G - 1) / G within
    ==================  =============================  ==========================

    If P is no power of two, halving-doubling uses the next lower one, 2 more hops and 2 more
    messages. ``hierarchical`` reduces within each of N = P / G hosts, then between hosts, whose
    workers share one link, then gathers within.

    Args:
        source: the cost of one link; or the costs over ``measured_on`` workers by the same
            algorithm (``hierarchical``: by a ring between hosts). Their curves become straight
            lines, because the change of a curve's shape with P is not known.
        workers: P, at least 1.
        algorithm: one of :data:`ALGORITHMS`.
        measured_on: number of workers of measured costs, at least 2.
        node: for ``hierarchical``: the workers of a host, and the links between them.

    Returns:
        Linear costs; one worker costs nothing.

    Raises:
        ValueError: no such algorithm, too few workers, or a node is missing or unused.

    Example:
        >>> link = Link(alpha_s=30e-6, beta_s_per_byte=4e-10)
        >>> scale(link, 16).all_reduce
        LinearCost(alpha_s=0.0009, beta_s_per_byte=7.5e-10)
        >>> scale(scale(link, 16), 64, measured_on=16) == scale(link, 64)
        True
    """
    if algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ValueError(f"algorithm {algorithm!r} is not known; known are {known}")
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, found {workers}")
    if (algorithm == "hierarchical") is not (node is not None):
        raise ValueError(f"node: {'missing' if node is None else 'not used'} for {algorithm!r}")
    work = _hierarchical(workers, node) if node else FLAT[algorithm](workers)
    if isinstance(source, Link):
        return Costs(_cost(source, work, node, 1.0))
    if measured_on < 2:
        raise ValueError(f"measured_on: expected at least 2 workers, found {measured_on}")
    measured = FLAT["ring" if node else algorithm](measured_on)

    def carried(curve: CostModel, share: float) -> LinearCost:
        line = fit_linear(curve.points) if isinstance(curve, PiecewiseCost) else curve
        assert isinstance(line, LinearCost)
        per_link = LinearCost(
            line.alpha_s / (share * measured.hops),
            line.beta_s_per_byte / (share * measured.volume),
        )
        return _cost(per_link, work, node, share)

    scatter, gather = source.reduce_scatter, source.all_gather
    return Costs(
        carried(source.all_reduce, 1.0),
        carried(scatter, 0.5) if scatter is not None else None,
        carried(gather, 0.5) if gather is not None else None,
        source.kappa,
    )


def _hierarchical(workers: int, node: Node) -> _Work:
    within = min(node.workers, workers)
    across, inside = _ring(-(-workers // within)), _ring(within)
    return _Work(across.hops, across.volume, inside.hops, inside.volume)


def _cost(per_link: LinearCost, work: _Work, node: Node | None, share: float) -> LinearCost:
    """``share`` of an all-reduce, from the cost of a link."""
    inner = node.link if node else Link(0.0, 0.0)
    return LinearCost(
        share * (work.hops * per_link.alpha_s + work.inner_hops * inner.alpha_s),
        share
        * (work.volume * per_link.beta_s_per_byte + work.inner_volume * inner.beta_s_per_byte),
    )

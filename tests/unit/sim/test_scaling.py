"""Costs carried over to other numbers of workers."""

from __future__ import annotations

import pytest

from tests.unit.core.test_planners import TRACES, uniform
from wfbp.comm.mpi.transfers import Chunking
from wfbp.core.cost import Costs, LinearCost, PiecewiseCost
from wfbp.core.planners import PLANNERS
from wfbp.core.trace import Trace
from wfbp.core.types import Operation
from wfbp.sim.scaling import ALGORITHMS, CHUNK_BYTES, FLAT, Link, Node, scale
from wfbp.sim.sweep import sweep

LINK = Link(alpha_s=1e-5, beta_s_per_byte=1e-9)
NODE = Node(8, Link(alpha_s=1e-6, beta_s_per_byte=1e-11))


def line(costs: Costs) -> tuple[float, float]:
    assert isinstance(costs.all_reduce, LinearCost)
    return costs.all_reduce.alpha_s, costs.all_reduce.beta_s_per_byte


@pytest.mark.parametrize(
    ("algorithm", "workers", "hops", "volume"),
    [
        ("ring", 1, 0, 0.0),
        ("ring", 2, 2, 1.0),
        ("ring", 64, 126, 2 * 63 / 64),
        ("tree", 1, 0, 0.0),
        ("tree", 2, 2, 2.0),
        ("tree", 65, 14, 2.0),
        ("tree", 2048, 22, 2.0),
        ("halving_doubling", 1, 0, 0.0),
        ("halving_doubling", 64, 12, 2 * 63 / 64),
        ("halving_doubling", 65, 14, 2 * 63 / 64 + 2),
    ],
)
def test_formulas(algorithm: str, workers: int, hops: int, volume: float) -> None:
    assert line(scale(LINK, workers, algorithm)) == pytest.approx((hops * 1e-5, volume * 1e-9))


def test_hierarchical_is_rings_within_and_between_hosts() -> None:
    within = line(scale(NODE.source, 8))
    between = line(scale(LINK, 16))
    both = line(scale(LINK, 128, "hierarchical", node=NODE))
    assert both == pytest.approx((within[0] + between[0], max(within[1], between[1])))
    assert line(scale(LINK, 8, "hierarchical", node=NODE)) == pytest.approx(within)
    assert line(scale(LINK, 4, "hierarchical", node=NODE)) == pytest.approx(
        line(scale(NODE.source, 4))
    )
    alone = Node(1, Link(0.0, 0.0))
    assert line(scale(LINK, 16, "hierarchical", node=alone)) == pytest.approx(between)
    assert both[0] < line(scale(LINK, 128))[0]


@pytest.mark.parametrize("algorithm", FLAT)
def test_measured_costs_go_through_links_to_any_size_and_back(algorithm: str) -> None:
    at_16 = scale(LINK, 16, algorithm)
    assert line(scale(at_16, 256, algorithm, measured_on=16)) == pytest.approx(
        line(scale(LINK, 256, algorithm))
    )
    halves = Costs(at_16.all_reduce, LinearCost(3e-4, 2e-9), LinearCost(1e-4, 1e-9), kappa=0.3)
    far = scale(halves, 256, algorithm, measured_on=16)
    back = scale(far, 16, algorithm, measured_on=256)
    assert back.kappa == 0.3
    for ours, theirs in (
        (back.reduce_scatter, halves.reduce_scatter),
        (back.all_gather, halves.all_gather),
    ):
        assert ours is not None
        assert theirs is not None
        assert ours(0) == pytest.approx(theirs(0))
        assert ours(1e6) == pytest.approx(theirs(1e6))


def test_measured_curves_become_lines() -> None:
    curve = PiecewiseCost(tuple((m, 1e-4 + 1e-9 * m) for m in (4.0, 1e3, 1e6, 1e8)))
    assert line(scale(Costs(curve), 4)) == pytest.approx((3e-4, 1.5e-9), rel=1e-6)
    assert scale(Costs(curve), 2) == Costs(curve)


def test_chunks_on_one_level_hide_those_on_the_other() -> None:
    slow = PiecewiseCost(((4.0, 1e-3), (1e6, 9e-3)))
    fast = Costs(
        PiecewiseCost(((4.0, 1e-5), (1e4, 3e-5), (1e6, 2e-3))), all_gather=LinearCost(0, 0)
    )
    both = scale(Costs(slow), 4, "hierarchical", node=Node(2, fast))
    for size in (4.0, 1e4, 5e5, 1e6):
        assert both.all_reduce(size) == pytest.approx(slow(size) + fast.all_reduce(size))
        gather = both.of(Operation.ALL_GATHER)
        assert gather(size) == pytest.approx(slow(size) / 2)
    assert Chunking().window_bytes // 2 == CHUNK_BYTES
    chunks = 12  # all but one are hidden
    between = Costs(PiecewiseCost(((4.0, 1e-5), (chunks * CHUNK_BYTES, 0.4))))
    within = Node(2, Costs(PiecewiseCost(((4.0, 1e-5), (chunks * CHUNK_BYTES, 0.3)))))
    both = scale(between, 4, "hierarchical", node=within)
    assert both.all_reduce(chunks * CHUNK_BYTES) == pytest.approx(0.4 + 0.3 / chunks)


def test_costs_never_fall_with_workers() -> None:
    for algorithm in ALGORITHMS:
        node = NODE if algorithm == "hierarchical" else None
        times = [scale(LINK, 2**k, algorithm, node=node).all_reduce(1e6) for k in range(12)]
        assert times == sorted(times)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"algorithm": "star"}, "'star'; expected one of ring, tree, halving_doubling, hie"),
        ({"workers": 0}, "workers: expected at least 1, found 0"),
        ({"algorithm": "hierarchical"}, "node: missing for 'hierarchical'"),
        ({"node": NODE}, "node: not used for 'ring'"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale(LINK, **{"workers": 4, **arguments})


def test_bad_facts() -> None:
    with pytest.raises(ValueError, match="measured_on: expected at least 2 workers, found 1"):
        scale(Costs(LinearCost(1.0, 1.0)), 4, measured_on=1)
    with pytest.raises(ValueError, match="workers of a node: expected at least 1, found 0"):
        Node(0, LINK)
    with pytest.raises(ValueError, match="alpha_s: expected a finite number"):
        Link(float("nan"), 1.0)


def test_sweep_has_every_case_once_and_its_figures_agree() -> None:
    traces = [uniform(5, 0.01), Trace("other", uniform(3, 0.02).tensors)]
    workers, schedules = [1, 4, 16], list(PLANNERS)
    rows = sweep(traces, LINK, workers, schedules)
    keys = [(r.model, r.workers, r.schedule) for r in rows]
    assert keys == [(t.model, p, s) for t in traces for p in workers for s in schedules]
    for row in rows:
        assert row.compute_s <= row.lower_bound_s <= row.iteration_s
        assert row.speedup == row.workers * row.efficiency
        if row.workers == 1:
            assert row.efficiency == pytest.approx(1.0)


def test_more_workers_never_make_an_iteration_shorter() -> None:
    traces = [Trace.load(path) for path in TRACES if path.stem in ("vgg-16", "googlenet-k80")]
    rows = sweep(traces, LINK, [4, 32, 256, 2048], ["mgwfbp", "oasr", "hybrid"], "tree")
    for row, larger in zip(rows, rows[3:], strict=False):
        if row.model == larger.model and row.schedule != "mgwfbp":
            assert row.schedule == larger.schedule
            assert row.iteration_s <= larger.iteration_s * 1.0011

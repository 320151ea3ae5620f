"""The seconds that a message occupies the channel, by its bytes: one curve per collective.

``kappa``: computation takes 1 + kappa times as long while the channel is busy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.core.checks import check_format, instance, number, read_json
from wfbp.core.types import Operation

__all__ = [
    "CostModel",
    "Costs",
    "Line",
    "LinearCost",
    "PiecewiseCost",
    "cheapest",
    "monotone_points",
]

Floats = npt.NDArray[np.float64]
Line = tuple[float, float]
"""Seconds at 0 bytes, seconds per byte."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A start-up time and a time per byte: alpha + beta * m.

    Args:
        alpha_s: seconds of a message before its first byte.
        beta_s_per_byte: seconds per byte.

    Raises:
        ValueError: a value is negative or not finite.

    Example:
        >>> LinearCost(alpha_s=1e-3, beta_s_per_byte=1e-9)(1_000_000)
        0.002
    """

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        number("alpha_s", self.alpha_s)
        number("beta_s_per_byte", self.beta_s_per_byte)

    def __call__(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def many(self, nbytes: Floats) -> Floats:
        """Seconds of messages of these sizes in bytes."""
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def scaled(self, factor: float, part: float = 1.0) -> LinearCost:
        """The cost if all took so many times as long, and only this part of the bytes was sent."""
        return LinearCost(self.alpha_s * factor, self.beta_s_per_byte * factor * part)

    def packed(self, s_per_byte: float) -> LinearCost:
        """The cost if packing takes so many more seconds per byte."""
        return LinearCost(self.alpha_s, self.beta_s_per_byte + s_per_byte)

    def lines_below(self, max_bytes: float) -> tuple[Line, ...]:
        """Lines (a, b) with a, b >= 0 and cost(m) >= a + b * m for m in 0..``max_bytes``."""
        return ((self.alpha_s, self.beta_s_per_byte),)

    def to_json(self) -> dict[str, Any]:
        """This as JSON's types."""
        return {"alpha_s": self.alpha_s, "beta_s_per_byte": self.beta_s_per_byte}


@dataclass(frozen=True)
class PiecewiseCost:
    """A measured curve: straight lines between points, constant below the first.

    Above the last point it continues with the mean slope since the last point of at most half the
    largest size. (The slope of the last two points alone is mostly noise.) If that is 0, which is
    noise made monotone, it continues with the mean slope of the whole curve.

    Args:
        points: (bytes, seconds), at least two; bytes increase strictly, seconds never fall.
            :func:`monotone_points` makes such points from raw measurements.

    Raises:
        ValueError: with the index of the first wrong point.

    Example:
        >>> curve = PiecewiseCost(((4, 10e-6), (1_000_004, 1010e-6)))
        >>> round(curve(500_004), 9), curve(0)
        (0.00051, 1e-05)
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise ValueError(f"points: expected at least 2, found {len(self.points)}")
        for index, (size, seconds) in enumerate(self.points):
            number(f"points[{index}] bytes", size)
            number(f"points[{index}] seconds", seconds)
            if index == 0:
                continue
            last_size, last_seconds = self.points[index - 1]
            if size <= last_size:
                raise ValueError(
                    f"points[{index}]: bytes must increase, found {size:g} after {last_size:g}"
                )
            if seconds < last_seconds:
                raise ValueError(
                    f"points[{index}]: seconds must not fall, found {seconds:g} after "
                    f"{last_seconds:g}; make raw measurements monotone first"
                )

    @cached_property
    def _columns(self) -> Floats:
        columns: Floats = np.array(self.points, dtype=np.float64).T
        return columns

    @cached_property
    def _tail_s_per_byte(self) -> float:
        last_size, last_seconds = self.points[-1]
        index = max(bisect_right(self.points, last_size / 2, key=lambda p: p[0]) - 1, 0)
        if self.points[index][1] == last_seconds:
            index = 0
        size, seconds = self.points[index]
        return (last_seconds - seconds) / (last_size - size)

    def __call__(self, nbytes: float) -> float:
        points = self.points
        index = bisect_right(points, nbytes, key=lambda p: p[0])
        if index == 0:
            return points[0][1]
        size, seconds = points[index - 1]
        if index == len(points):
            return seconds + self._tail_s_per_byte * (nbytes - size)
        next_size, next_seconds = points[index]
        return seconds + (next_seconds - seconds) * ((nbytes - size) / (next_size - size))

    def many(self, nbytes: Floats) -> Floats:
        """Seconds of messages of these sizes in bytes."""
        sizes, seconds = self._columns
        inside = np.interp(nbytes, sizes, seconds)
        beyond = np.maximum(nbytes - sizes[-1], 0.0)
        result: Floats = inside + self._tail_s_per_byte * beyond
        return result

    def scaled(self, factor: float, part: float = 1.0) -> PiecewiseCost:
        """As of :class:`LinearCost`."""
        return PiecewiseCost(tuple((size / part, s * factor) for size, s in self.points))

    def packed(self, s_per_byte: float) -> PiecewiseCost:
        """As of :class:`LinearCost`."""
        return PiecewiseCost(tuple((size, s + size * s_per_byte) for size, s in self.points))

    def lines_below(self, max_bytes: float) -> tuple[Line, ...]:
        """As of :class:`LinearCost`."""
        # The sides of the lower convex hull that meet 0 bytes at 0 seconds or above, and the line
        # of the best rate per byte, through the origin.
        corners = [(0.0, self(0.0))]
        corners += [(x, y) for x, y in self.points if 0 < x < max_bytes]
        if max_bytes > 0:
            corners.append((max_bytes, self(max_bytes)))
        lines = [(corners[0][1], 0.0)]
        lines += [(0.0, min(y / x for x, y in corners[1:]))] if max_bytes > 0 else []
        hull = _lower_hull(corners)
        for (x0, y0), (x1, y1) in pairwise(hull):
            slope = (y1 - y0) / (x1 - x0)
            if y0 - slope * x0 >= 0:
                lines.append((y0 - slope * x0, slope))
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        """This as JSON's types."""
        return {"points": [[size, seconds] for size, seconds in self.points]}


CostModel = LinearCost | PiecewiseCost
"""Seconds of one message by its bytes, at least 0 and never falling; hashed by value."""


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Lower convex hull of points with increasing x (Andrew's monotone chain)."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def monotone_points(measured: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Raw measurements, (bytes, seconds) in any order, as points of a :class:`PiecewiseCost`.

    Takes the median of each size. If the curve still falls, pools neighbours to their mean
    (isotonic least squares by pooling adjacent violators).

    Example:
        >>> monotone_points([(8, 3.0), (4, 1.0), (16, 1.0), (4, 3.0)])
        ((4, 2.0), (8, 2.0), (16, 2.0))
    """
    by_size: dict[float, list[float]] = {}
    for size, seconds in measured:
        by_size.setdefault(size, []).append(seconds)
    pools: list[tuple[float, list[float]]] = []
    for size in sorted(by_size):
        mean, sizes = float(np.median(by_size[size])), [size]
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean = (other * len(others) + mean * len(sizes)) / (len(others) + len(sizes))
            sizes = others + sizes
        pools.append((mean, sizes))
    return tuple((size, mean) for mean, sizes in pools for size in sizes)


FORMAT = "wfbp-cost/1"
LINEAR_KEYS = ("alpha_s", "beta_s_per_byte")


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of each collective on one channel.

    Args:
        all_reduce: cost by bytes.
        reduce_scatter: cost by bytes of the whole buffer; half of ``all_reduce`` if None.
        all_gather: cost by bytes of the whole buffer; half of ``all_reduce`` if None.
        kappa: interference. Computation takes 1 + kappa times as long while the channel is busy.

    Raises:
        ValueError: ``kappa`` is negative or not finite.

    Example:
        >>> costs = Costs(LinearCost(alpha_s=1e-3, beta_s_per_byte=1e-9))
        >>> costs.of(Operation.ALL_REDUCE)(0), costs.of(Operation.ALL_GATHER)(0)
        (0.001, 0.0005)
    """

    all_reduce: CostModel
    reduce_scatter: CostModel | None = None
    all_gather: CostModel | None = None
    kappa: float = 0.0

    def __post_init__(self) -> None:
        number("kappa", self.kappa)

    def of(self, operation: Operation) -> CostModel:
        """The cost of one collective; half of all-reduce if it has no curve."""
        if operation is Operation.ALL_REDUCE:
            return self.all_reduce
        own = self.reduce_scatter if operation is Operation.REDUCE_SCATTER else self.all_gather
        return _half(self.all_reduce) if own is None else own

    def compressed(self, part: float) -> Costs:
        """The costs if reduced gradients shrink to this part; gathered parameters do not."""
        if part == 1.0:
            return self
        shrunk = self.map(lambda curve: curve.scaled(1.0, part))
        return replace(shrunk, all_gather=self.of(Operation.ALL_GATHER))

    def encoded(self, s_per_byte: float) -> Costs:
        """The costs if to encode and decode gradients takes so many more seconds per byte: sums are
        encoded again in an all-reduce, and half of the work is that of a reduce-scatter."""
        if not s_per_byte:
            return self
        return replace(
            self,
            all_reduce=self.all_reduce.packed(s_per_byte),
            reduce_scatter=self.of(Operation.REDUCE_SCATTER).packed(s_per_byte / 2),
            all_gather=self.of(Operation.ALL_GATHER),
        )

    def map(self, change: Callable[[CostModel], CostModel]) -> Costs:
        """The costs with every given curve changed."""
        curves: dict[str, Any] = {name: change(curve) for name, curve in self._given.items()}
        return replace(self, **curves)

    @property
    def _given(self) -> dict[str, CostModel]:
        curves = {operation.value: getattr(self, operation.value) for operation in Operation}
        return {name: curve for name, curve in curves.items() if curve is not None}

    def to_json(self) -> dict[str, Any]:
        """The costs as plain data, format ``wfbp-cost/1``."""
        curves = {name: curve.to_json() for name, curve in self._given.items()}
        return {"format": FORMAT, **curves, "kappa": self.kappa}

    @classmethod
    def from_json(cls, data: Any) -> Costs:
        """The costs in a parsed ``wfbp-cost/1`` document; ``ValueError`` names the wrong place.

        Each curve is ``{"alpha_s": a, "beta_s_per_byte": b}`` or ``{"points": [[bytes, seconds],
        ...]}``; only ``all_reduce`` is required. ``num_ranks`` is allowed and ignored.
        """
        check_format("a cost file", data, FORMAT)
        names = [operation.value for operation in Operation]
        _only_known("", data, ("format", *names, "kappa", "num_ranks"))
        if "all_reduce" not in data:
            raise ValueError("all_reduce: missing")
        curves = {name: _curve(name, data[name]) for name in names if name in data}
        return cls(**curves, kappa=number("kappa", data.get("kappa", 0.0)))

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """The costs in a JSON file; ``ValueError`` starts with the file's name."""
        return read_json(path, cls.from_json)


def cheapest(ways: Iterable[Costs], max_bytes: float) -> Costs:
    """The costs of messages of at most ``max_bytes`` if each is sent in its fastest way.

    An exact planner stays exact with these costs. No message ends later if one before it takes
    less time, so some best plan sends each group in its fastest way.

    Example:
        >>> plain, encoded = Costs(LinearCost(1e-3, 4e-9)), Costs(LinearCost(2e-3, 1e-9))
        >>> curve = cheapest([plain, encoded], 4e6).all_reduce
        >>> round(curve(1e5), 9), round(curve(1e6), 9)
        (0.0014, 0.003)
    """
    first, *others = ways
    curves: dict[str, Any] = {
        operation.value: _lowest([each.of(operation) for each in (first, *others)], max_bytes)
        for operation in Operation
    }
    return replace(first, **curves) if others else first


def _lowest(curves: Sequence[CostModel], max_bytes: float) -> CostModel:
    """The least of some curves, which are straight between their points, up to ``max_bytes``."""
    corners = {0.0, max_bytes}
    for curve in curves:
        points = curve.points if isinstance(curve, PiecewiseCost) else ()
        corners.update(size for size, _ in points if size < max_bytes)
    for a, b in pairwise(sorted(corners)):
        for one, other in combinations(curves, 2):
            left, right = one(a) - other(a), one(b) - other(b)
            if left * right < 0:
                corners.add(a + (b - a) * left / (left - right))
    sizes = np.array(sorted(corners))
    seconds = np.array([curve.many(sizes) for curve in curves])
    least = seconds.min(axis=0)
    for curve, own in zip(curves, seconds, strict=True):
        if np.array_equal(own, least):
            return curve
    rising = np.maximum.accumulate(least)  # crossings are rounded
    return PiecewiseCost(tuple(zip(sizes.tolist(), rising.tolist(), strict=True)))


@lru_cache(maxsize=64)  # planners ask often, and a curve makes arrays when it is first used
def _half(curve: CostModel) -> CostModel:
    return curve.scaled(0.5)


def _only_known(place: str, data: dict[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(
            f"{place}unknown key {', '.join(map(repr, unknown))}; known are {', '.join(known)}"
        )


def _curve(place: str, data: Any) -> CostModel:
    if "points" in instance(place, data, dict):
        _only_known(f"{place}: ", data, ("points",))
        points = instance(f"{place}.points", data["points"], list)
        pairs = tuple(_point(f"{place}.points[{i}]", pair) for i, pair in enumerate(points))
        try:
            return PiecewiseCost(pairs)
        except ValueError as error:
            raise ValueError(f"{place}.{error}") from error
    _only_known(f"{place}: ", data, LINEAR_KEYS)
    missing = [key for key in LINEAR_KEYS if key not in data]
    if missing:
        raise ValueError(f"{place}: missing {', '.join(missing)}")
    return LinearCost(*(number(f"{place}.{key}", data[key]) for key in LINEAR_KEYS))


def _point(place: str, pair: Any) -> tuple[float, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{place}: expected [bytes, seconds], found {pair!r}")
    return number(f"{place} bytes", pair[0]), number(f"{place} seconds", pair[1])

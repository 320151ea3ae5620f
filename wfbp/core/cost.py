"""The costs of a channel: one curve per collective, and what overlap costs the computation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from wfbp.core.checks import number
from wfbp.core.curves import CostModel, Line, LinearCost, PiecewiseCost, monotone_points
from wfbp.core.types import Operation

__all__ = ["CostModel", "Costs", "Line", "LinearCost", "PiecewiseCost", "monotone_points"]

FORMAT = "wfbp-cost/1"
LINEAR_KEYS = ("alpha_s", "beta_s_per_byte")


@dataclass(frozen=True, slots=True)
class Costs:
    """What each collective costs on one channel.

    Args:
        all_reduce: cost of an all-reduce by bytes.
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
        """The cost of one collective; half of all-reduce where nothing else was given."""
        if operation is Operation.ALL_REDUCE:
            return self.all_reduce
        own = self.reduce_scatter if operation is Operation.REDUCE_SCATTER else self.all_gather
        return _half(self.all_reduce) if own is None else own

    def to_json(self) -> dict[str, Any]:
        """The costs as plain data, format ``wfbp-cost/1``."""
        data: dict[str, Any] = {"format": FORMAT, "all_reduce": self.all_reduce.to_json()}
        if self.reduce_scatter is not None:
            data["reduce_scatter"] = self.reduce_scatter.to_json()
        if self.all_gather is not None:
            data["all_gather"] = self.all_gather.to_json()
        data["kappa"] = self.kappa
        return data

    @classmethod
    def from_json(cls, data: Any) -> Costs:
        """The costs in a ``wfbp-cost/1`` document.

        Args:
            data: the document, parsed. Each curve is either ``{"alpha_s": a, "beta_s_per_byte":
                b}`` or ``{"points": [[bytes, seconds], ...]}``; all but ``all_reduce`` may be
                absent.

        Raises:
            ValueError: one line with the place and what was found there.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            actual = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a cost file: expected format {FORMAT!r}, found {actual!r}")
        known = ("format", "all_reduce", "reduce_scatter", "all_gather", "kappa")
        _only_known("", data, known)
        if "all_reduce" not in data:
            raise ValueError("all_reduce: missing")
        return cls(
            _curve("all_reduce", data["all_reduce"]),
            _curve("reduce_scatter", data["reduce_scatter"]) if "reduce_scatter" in data else None,
            _curve("all_gather", data["all_gather"]) if "all_gather" in data else None,
            number("kappa", data.get("kappa", 0.0)),
        )

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """The costs in a JSON file.

        Raises:
            ValueError: not JSON or not costs; one line that starts with the file's name.
            OSError: the file cannot be read.
        """
        text = Path(path).read_bytes()
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON: {error}") from error
        try:
            return cls.from_json(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


@lru_cache(maxsize=64)
def _half(curve: CostModel) -> CostModel:
    """Kept, because planners ask often, and a curve works out arrays when it is first used."""
    return curve.scaled(0.5)


def _only_known(place: str, data: dict[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise ValueError(
            f"{place}unknown key {', '.join(map(repr, unknown))}; known are {', '.join(known)}"
        )


def _curve(place: str, data: Any) -> CostModel:
    if not isinstance(data, dict):
        raise ValueError(f"{place}: expected an object, found {type(data).__name__}")
    if "points" in data:
        _only_known(f"{place}: ", data, ("points",))
        points = data["points"]
        if not isinstance(points, list):
            raise ValueError(f"{place}.points: expected a list, found {type(points).__name__}")
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

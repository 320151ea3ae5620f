"""Measures the network's costs, once for each kind of backend."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from wfbp.comm.backend import Backend, Finished
from wfbp.comm.probe import measure_cost
from wfbp.core.cost import Costs, PiecewiseCost, monotone_points
from wfbp.core.types import Operation

_LEAST_S = 0.2
_BYTES_PER_S = 32 << 20
"""The time budget per operation: a constant, and the largest message at this rate."""

_GROUP_S = 2e-4
"""CPU cost of a group if the network progresses alone: 0.26 to 0.33 ms at 1 Gbit/s
(docs/benchmarks/training.md). Streams hide it; without it plans follow the curve's noise."""

log = logging.getLogger("wfbp")


class NetworkCosts:
    """The cost curves that the ranks measured together, in about ``budget_s`` seconds.

    ``check(label, seconds waited)`` is called repeatedly and raises if waiting is hopeless.
    """

    def __init__(
        self, budget_s: float, check: Callable[[str, float], None], is_logger: bool = False
    ) -> None:
        self._is_logger = is_logger
        self._budget_s = budget_s
        self._check = check
        self._curves: dict[str, dict[Operation, tuple[int, PiecewiseCost]]] = {}

    def _log(self, message: str, *values: object) -> None:
        if self._is_logger:
            log.info(f"network: {message}", *values)

    def measure(
        self,
        max_bytes: int,
        operations: Sequence[Operation],
        anew: bool,
        lane_backend: Backend | None,
        call: Callable[[Callable[[Backend], Any], str], Any],
    ) -> Costs:
        """As :meth:`Runtime.measure_costs`; ``call`` runs one collective."""
        curves = self._curves.setdefault(type(lane_backend).__name__, {})
        if anew:
            curves.clear()
        missing = [
            operation
            for operation in Operation
            if (operation is Operation.ALL_REDUCE or operation in operations)
            and (operation not in curves or curves[operation][0] < max_bytes)
        ]
        if missing:
            limits = call(
                lambda host: host.all_gather_bytes(b"%d" % (lane_backend or host).probe_limit()),
                "measuring the network's costs",
            )
            limit = min(map(int, limits))
            known_bytes = max_bytes if max_bytes < limit else sys.maxsize
            max_bytes = min(max_bytes, limit)
            budget_s = min(self._budget_s / len(missing), _LEAST_S + max_bytes / _BYTES_PER_S)
            begin_s = time.perf_counter()
            self._log(
                "measuring what messages of up to %s bytes cost, for at most %.1f s",
                f"{max_bytes:,}",
                budget_s * len(missing),
            )
            for operation in missing:
                curve = self._curve(operation, max_bytes, budget_s, lane_backend, call)
                curves[operation] = known_bytes, curve
            if lane_backend is not None:
                lane_backend.trim()
            self._log("measured in %.1f s", time.perf_counter() - begin_s)
        known: dict[str, Any] = {operation.value: c for operation, (_, c) in curves.items()}
        return Costs(**known)

    def _curve(
        self,
        operation: Operation,
        max_bytes: int,
        budget_s: float,
        lane_backend: Backend | None,
        call: Callable[[Callable[[Backend], Any], str], Any],
    ) -> PiecewiseCost:
        label = f"measuring the network's {operation.value}"
        group_s = _GROUP_S if operation is Operation.ALL_REDUCE else _GROUP_S / 2

        def measure(host: Backend) -> Finished[Any]:
            backend = lane_backend or host
            points = monotone_points(
                measure_cost(
                    backend,
                    max_bytes=max_bytes,
                    operation=operation,
                    budget_s=budget_s,
                    check=partial(self._check, label),
                )
            )
            added_s = group_s if backend.progresses_alone else 0.0
            return Finished(tuple((size, seconds + added_s) for size, seconds in points))

        points = call(measure, label)
        (least, first_s), (most, last_s) = points[0], points[-1]
        self._log(
            "%s: %d bytes in %.1f us, %s bytes in %.2f ms (%.2f GB/s)",
            operation.value,
            least,
            first_s * 1e6,
            f"{most:,}",
            last_s * 1e3,
            most / last_s * 1e-9,
        )
        return PiecewiseCost(points)

"""Measures the network's costs, once for each kind of backend."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from wfbp.comm.backend import Backend, Finished, HostBackend
from wfbp.comm.cost_probe import measure_cost, measure_kappa
from wfbp.comm.locations import Call
from wfbp.core.cost import Costs, PiecewiseCost, monotone_points
from wfbp.core.types import Operation

_LEAST_S = 0.2
_BYTES_PER_S = 32 << 20
"""Time budget per operation: this many seconds, plus the largest message at this rate."""

_GROUP_S = 2e-4
"""CPU cost of a group if the network progresses alone: 0.26 to 0.33 ms at 1 Gbit/s
(docs/benchmarks/training.md). Measurements with two messages under way hide it. Without it,
plans follow the noise of the curve."""

log = logging.getLogger("wfbp")


class NetworkCosts:
    """The cost curves that the ranks measured together, in about ``budget_s`` seconds.

    ``check(label, seconds waited)`` is called repeatedly and raises if waiting is hopeless.
    """

    def __init__(
        self, budget_s: float, check: Callable[[str, float], None], is_logger: bool = False
    ) -> None:
        self.part_of_cores = 1.0
        """Of the cores that this rank computes on, the part that its communication thread takes."""
        self._is_logger = is_logger
        self._budget_s = budget_s
        self._check = check
        # By kind of backend: the largest message size of a curve, and the curve.
        self._curves: dict[str, dict[Operation, tuple[int, PiecewiseCost]]] = {}
        self._kappas: dict[str, float] = {}

    def measure(
        self,
        max_bytes: int,
        operations: Sequence[Operation],
        anew: bool,
        lane_backend: Backend | None,
        call: Call,
    ) -> Costs:
        """Cost curves up to a message size, equal on every rank, each measured once, or ``anew``;
        ``call`` runs one collective. ``lane_backend`` is of a lane that sends nothing now."""
        kind = type(lane_backend).__name__
        curves = self._curves.setdefault(kind, {})
        if anew:
            curves.clear()
        wanted = {Operation.ALL_REDUCE, *operations}
        missing = [
            operation
            for operation in Operation
            if operation in wanted and (operation not in curves or curves[operation][0] < max_bytes)
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
            self._log(
                f"measuring what messages of up to {max_bytes:,} bytes cost, "
                f"for at most {budget_s * len(missing):.1f} s"
            )
            for operation in missing:
                curve = self._curve(operation, max_bytes, budget_s, lane_backend, call)
                curves[operation] = known_bytes, curve
            if Operation.ALL_REDUCE in missing:
                self._kappas[kind] = self._kappa(max_bytes, budget_s, curves, lane_backend, call)
            if lane_backend is not None:
                lane_backend.trim()
        known = {operation.value: c for operation, (_, c) in curves.items()}
        return Costs(**known, kappa=self._kappas[kind])

    def _kappa(
        self,
        max_bytes: int,
        budget_s: float,
        curves: Mapping[Operation, tuple[int, PiecewiseCost]],
        lane_backend: Backend | None,
        call: Call,
    ) -> float:
        """Kappa of messages that take a core from training."""
        label = "measuring the network's processor time"
        _, cost = curves[Operation.ALL_REDUCE]

        def measure(host: Backend) -> Finished[float]:
            backend = lane_backend or host
            if not isinstance(backend, HostBackend):  # a device computes by itself
                return Finished(0.0)
            group_s = _GROUP_S if backend.progresses_alone else 0.0
            kappa = measure_kappa(
                backend,
                max_bytes,
                lambda nbytes: cost(nbytes) - group_s,
                self.part_of_cores,
                budget_s=budget_s / 4,
                check=partial(self._check, label),
            )
            return Finished(kappa)

        kappa = call(measure, label)
        self._log(f"compute takes {1.0 + kappa:.2f} times as long beside messages")
        return kappa

    def _curve(
        self,
        operation: Operation,
        max_bytes: int,
        budget_s: float,
        lane_backend: Backend | None,
        call: Call,
    ) -> PiecewiseCost:
        label = f"measuring the network's {operation.value}"
        check = partial(self._check, label)
        group_s = _GROUP_S if operation is Operation.ALL_REDUCE else _GROUP_S / 2

        def measure(host: Backend) -> Finished[tuple[tuple[float, float], ...]]:
            backend = lane_backend or host
            measured = measure_cost(
                backend, max_bytes=max_bytes, operation=operation, budget_s=budget_s, check=check
            )
            added_s = group_s if backend.progresses_alone else 0.0
            points = monotone_points(measured)
            return Finished(tuple((size, seconds + added_s) for size, seconds in points))

        points = call(measure, label)
        (least, first_s), (most, last_s) = points[0], points[-1]
        self._log(
            f"{operation.value}: {least} bytes in {first_s * 1e6:.1f} us, "
            f"{most:,} bytes in {last_s * 1e3:.2f} ms ({most / last_s * 1e-9:.2f} GB/s)"
        )
        return PiecewiseCost(points)

    def _log(self, text: str) -> None:
        if self._is_logger:
            log.info("network: %s", text)

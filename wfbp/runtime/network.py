"""What the network costs, measured once for each way of going through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from wfbp.comm.backend import Backend, Finished
from wfbp.comm.device_backend import DeviceBackend
from wfbp.comm.probe import measure_cost
from wfbp.core.cost import Costs, PiecewiseCost, monotone_points
from wfbp.core.types import Operation

_LARGEST_BYTES = 16 << 20
"""Of the host's messages. Larger ones cost in proportion, by the curve's upper half; to measure
them takes up to three times their size in memory, and seconds where the link is slow. A device's
links are not yet at their full rate there."""


class NetworkCosts:
    """The cost curves that ranks have measured together.

    Args:
        budget_s: seconds that measuring may take, about, in all.
        check: called again and again with a label and the seconds waited; raises where waiting on
            is hopeless.
    """

    def __init__(
        self,
        budget_s: float,
        check: Callable[[str, float], None],
    ) -> None:
        self._budget_s = budget_s
        self._check = check
        self._curves: dict[str, dict[Operation, tuple[int, PiecewiseCost]]] = {}
        self._costs: dict[str, Costs] = {}

    def measure(
        self,
        max_bytes: int,
        operations: Sequence[Operation],
        anew: bool,
        carrier: Backend | None,
        call: Callable[[Callable[[Backend], Any], str], Any],
    ) -> Costs:
        """As :meth:`Runtime.measure_costs`; ``call`` runs one collective."""
        through = carrier if isinstance(carrier, DeviceBackend) else None
        way = type(through).__name__
        curves = self._curves.setdefault(way, {})
        if through is None:
            max_bytes = min(max_bytes, _LARGEST_BYTES)
        if anew:
            curves.clear()
        missing = [
            operation
            for operation in Operation
            if (operation is Operation.ALL_REDUCE or operation in operations)
            and (operation not in curves or curves[operation][0] < max_bytes)
        ]
        if missing:
            budget_s = self._budget_s / len(missing)
            for operation in missing:
                label = f"measuring the network's {operation.value}"
                measure = partial(
                    measure_cost,
                    max_bytes=max_bytes,
                    operation=operation,
                    budget_s=budget_s,
                    check=partial(self._check, label),
                )
                points = call(
                    lambda backend, act=measure: Finished(act(through or backend)),  # type: ignore[misc]
                    label,
                )
                curves[operation] = max_bytes, PiecewiseCost(monotone_points(points))
            curve = {operation: curve for operation, (_, curve) in curves.items()}
            self._costs[way] = Costs(
                curve[Operation.ALL_REDUCE],
                curve.get(Operation.REDUCE_SCATTER),
                curve.get(Operation.ALL_GATHER),
            )
        return self._costs[way]

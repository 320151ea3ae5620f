"""Compares averages of encoded gradients with exact ones, one tensor every few steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wfbp.core.types import Op, TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.runtime.buffers import shard_range
from wfbp.runtime.lane import Lane
from wfbp.runtime.progress.channel import ControlChannel
from wfbp.runtime.step import BufferView, Step

log = logging.getLogger("wfbp")

EVERY_STEPS = 64
_LEAST_COSINES = {"int8": 0.99, "fp8": 0.99, "int4": 0.9}
_NUM_BAD = 5
"""So many samples in a row are an alarm."""

Sums = list[float]

MOST_ELEMENTS = 1 << 18
"""Of a tensor, at most so many are compared, of the shard of one rank."""


def sums_of(
    sent: npt.NDArray[np.float32] | None,
    exact: npt.NDArray[np.float32],
    error: npt.NDArray[np.float32],
    weight: float,
) -> Sums:
    """This rank's part of a sample: of the average as it was sent (None on all ranks but the owner
    of that shard), of the exact one, and of errors that the next step makes up for, which count
    with this weight in the average."""
    kept = np.asarray(error, np.float64) * weight
    if sent is None:
        return [0.0] * 4 + [float(kept @ kept)]
    a, b = np.asarray(sent, np.float64), np.asarray(exact, np.float64)
    return [float(x @ y) for x, y in ((a, b), (a, a), (b, b), (a - b, a - b), (kept, kept))]


class Samples:
    """The samples so far. Equal sums give equal answers, so ranks agree."""

    def __init__(self, name: str, falls_back: bool, is_logger: bool) -> None:
        self.latest: dict[str, Any] | None = None
        """For reports."""
        self._name, self._falls_back, self._is_logger = name, falls_back, is_logger
        self._num_bad = 0
        self._has_warned = False
        self._number = -1

    def choose(self, candidates: Sequence[int], num_ranks: int) -> tuple[int, int]:
        """The next one of these tensors, unless the last one was bad; and whose shard of it."""
        if not self._num_bad:
            self._number += 1
        return candidates[self._number % len(candidates)], self._number % num_ranks

    def add(self, tensor: str, codec: str, step: int, ranks: Sequence[Sums]) -> bool:
        """Add a sample by the sums of all ranks; whether to send more bits from now on."""
        dot, sent, exact, difference, error = (math.fsum(each) for each in zip(*ranks, strict=True))
        if not exact > 0 or not math.isfinite(dot + sent + difference):
            return False  # zeros, or a step that a scaler will skip
        cosine = dot / math.sqrt(sent * exact) if sent else 0.0
        self.latest = {
            "tensor": tensor,
            "step": step,
            "cosine": cosine,
            "relative_error": math.sqrt(difference / exact),
            "kept_error": math.sqrt(error / exact),
        }
        least = _LEAST_COSINES[codec]
        self._num_bad = self._num_bad + 1 if cosine < least else 0
        if self._num_bad < _NUM_BAD:
            return False
        self._num_bad = 0
        if self._is_logger and not self._has_warned:
            remedy = "they are sent in 16 bits from here on" if self._falls_back else "use bf16"
            log.warning(
                "%s: %d samples of encoded gradients in a row have a cosine below %s with exact "
                "ones (%s: %.4f): %s",
                self._name,
                _NUM_BAD,
                least,
                tensor,
                cosine,
                remedy,
            )
        self._has_warned = True
        return self._falls_back


class CompressionGuard:
    """Samples the encoded gradients of one reducer."""

    def __init__(
        self,
        lane: Lane,
        channel: ControlChannel,
        options: ReducerOptions,
        specs: Sequence[TensorSpec],
        is_logger: bool,
    ) -> None:
        self._lane, self._channel, self._specs = lane, channel, specs
        self._averages = options.op is Op.AVERAGE
        self.samples = Samples(options.name, options.guard == "fallback", is_logger)

    def compare(
        self,
        number: int,
        codecs: Mapping[int, str],
        step: Step,
        reduced: Sequence[BufferView | None],
    ) -> bool:
        """Compare an average of step ``number`` with an exact one; whether to send more bits from
        now on. A collective. ``codecs`` are those of the tensors that were sent encoded."""
        rank, size = self._lane.backend.rank, self._lane.backend.size
        index, owner = self.samples.choose(list(codecs), size)
        spec, view = self._specs[index], reduced[index]
        first, last = (at // spec.item_bytes for at in shard_range(spec, owner, size))
        if first == last:  # a small tensor has fewer shards than ranks
            owner, (first, last) = 0, (at // spec.item_bytes for at in shard_range(spec, 0, size))
        last = min(last, first + MOST_ELEMENTS)
        part = TensorSpec(spec.name, (last - first,), spec.dtype)
        address = step.sources[index] and step.sources[index] + first * spec.item_bytes
        (exact,) = self._lane.reduce_now(self._channel, [part], [(address, step.owners[index])])
        assert exact is not None
        assert view is not None
        error, sum_error = self._lane.errors.of(index)
        sent = None
        if owner == rank:
            own = slice(*shard_range(spec, rank, size))
            shard = view.data[own] if view.whole else view.data
            sent, error = shard.view(np.float32)[: last - first], sum_error[: last - first]
            weight = 1.0
        else:
            error, weight = error[first:last], 1.0 / size if self._averages else 1.0
        mine = sums_of(sent, exact.data.view(np.float32), error, weight)
        ranks = self._channel.exchange_values(mine, "comparing compressed gradients")
        return self.samples.add(spec.name, codecs[index], number, ranks)

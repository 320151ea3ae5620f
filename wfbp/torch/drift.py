"""Detects that the parameters of ranks drift apart.

Ranks start with equal parameters and step by equal averages, so their parameters stay equal, unless
a program updates them by gradients, losses or random numbers of one rank. After each update (on a
device after some) one parameter is sampled, and a few bits of the sample's checksum travel in the
flags of the next step. If these differ, ranks compare the samples. Rounding errors of unlike
processors are no drift.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import torch

from wfbp.core.ranks import name_values
from wfbp.errors import DisagreementError
from wfbp.runtime.buffers import NUM_MARKS
from wfbp.runtime.reducer import Reducer
from wfbp.runtime.runtime import Runtime
from wfbp.torch import tensors

_ROUNDING = 16
"""Differences of so many units of rounding are normal."""
_MUCH = 1e-2
"""A difference that is an error, over the largest value of a sample."""
_NUM_ELEMENTS = 16
"""Of a parameter, in a sample."""
_MOST_DISCARDS = 3
_DEVICE_EVERY = 64
"""Steps per sample on a device, because the host waits for it."""


class Drift:
    """Samples of one optimizer's parameters. Used by the training thread."""

    def __init__(self, runtime: Runtime, reducer: Reducer, params: Sequence[torch.Tensor]) -> None:
        self._runtime = runtime
        self._reducer = reducer
        self._params = params
        trained = [k for k, p in enumerate(params) if p.requires_grad]
        self._indices = trained or range(len(params))
        self._every = 1 if params[0].device.type == "cpu" else _DEVICE_EVERY
        self._first = 0
        """No samples before this step: after small differences, ranks sample less often."""
        self._pause = 1
        self._chosen = self._indices[0]
        self._sample = b""
        self.mark: int | None = None
        """Of the sample, which ranks compare at the next step; None agrees with any."""
        self._discarded: list[torch.Tensor] = []

    def sample(self) -> None:
        """Parameters have been updated, and are whole. Ranks choose the same one, because they have
        ended equally many steps."""
        self._discarded.clear()
        number, indices = self._reducer.num_steps, self._indices
        if number < self._first or number % self._every:
            self.forget()
            return
        self._chosen = indices[number // self._every % len(indices)]
        param = self._params[self._chosen]
        self._sample = _elements(param).cpu().view(torch.uint8).numpy().tobytes()
        self.mark = zlib.crc32(self._sample) % NUM_MARKS

    def forget(self) -> None:
        """Agree with any rank at the next step."""
        self.mark, self._sample = None, b""

    def note_discard(self) -> None:
        """Gradients are cleared that no step has averaged. Warn if parameters change between."""
        samples, sample = self._discarded, tensors.sample(self._params[self._indices[0]])
        if not (samples and torch.equal(samples[-1], sample)):
            samples.append(sample)
        if len(samples) > _MOST_DISCARDS:
            samples.clear()
            self._runtime.warn_once(
                "discards",
                f"{self._reducer.who}: gradients of {_MOST_DISCARDS} steps were cleared without "
                "being averaged over the ranks, and parameters have changed meanwhile. Update them "
                "by step(), by a method of the optimizer, or after optimizer.synchronize()",
            )

    def compare(self) -> DisagreementError | None:
        """After a step with different marks: the error, the same on every rank, if parameters
        differ by much more than rounding. Collective."""
        reducer = self._reducer
        mine = struct.pack("I", self._chosen) + self._sample if self._sample else b""
        payloads = reducer.channel.exchange(mine, "parameters that differ")
        self.forget()
        self._first, self._pause = reducer.num_steps + self._pause, 2 * self._pause
        index = next(filter(None, payloads), b"")[:4]  # ranks have chosen the same, if any
        sampled = {rank: text[4:] for rank, text in enumerate(payloads) if text[:4] == index}
        if not index or len(sampled) < 2:
            return None
        (chosen,) = struct.unpack("I", index)
        dtype = self._params[chosen].dtype
        by_rank = {rank: _values(sample, dtype) for rank, sample in sampled.items()}
        values = torch.stack(list(by_rank.values()))
        ranges = values.amax(0) - values.amin(0)
        largest = float(values.abs().max())
        difference = float(ranges.max()) / largest if largest else 0.0
        rounding = _ROUNDING * torch.finfo(dtype).eps
        if difference <= rounding:
            return None
        place = int(ranges.argmax())
        shown = name_values({rank: f"{float(each[place]):g}" for rank, each in by_rank.items()})
        problem = (
            f"{reducer.who}: parameters have drifted apart: {reducer.specs[chosen].name} "
            f"differs between ranks by {difference:.1g} of its largest value ({shown}). An update "
            "has used what ranks have for themselves, such as a gradient or loss that was not "
            "averaged, or a random number; or some ranks alone have changed parameters. Average "
            "such values by wfbp.allreduce(), and read gradients after optimizer.synchronize(). "
            "For ranks that are to differ, pass check_parameters=False to DistributedOptimizer"
        )
        if difference > max(_MUCH, 2 * rounding):
            return DisagreementError(problem)
        self._runtime.warn_once("drift", problem)
        return None


def _elements(param: torch.Tensor) -> torch.Tensor:
    """Some elements, the same ones whatever the memory order."""
    count = param.numel()
    places = range(0, count, max(1, count // _NUM_ELEMENTS))[:_NUM_ELEMENTS]
    param = tensors.resolved(param.detach())
    if param.is_contiguous():
        return param.view(-1)[places.start : places.stop : places.step].clone()
    return param[torch.unravel_index(torch.tensor(places, device=param.device), param.shape)]


def _values(sample: bytes, dtype: torch.dtype) -> torch.Tensor:
    """The finite real numbers of a sample."""
    values = torch.frombuffer(bytearray(sample), dtype=torch.uint8).view(dtype)
    real = torch.view_as_real(values) if dtype.is_complex else values
    return torch.nan_to_num(real.flatten().double(), 0.0, 0.0, 0.0)

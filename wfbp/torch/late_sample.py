"""Samples of gradients on a device, compared there; the host hears of it without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

SAMPLED = 16
"""Elements."""

FIRST_STEPS, EVERY_STEPS = 8, 64
"""Steps that are looked at: a program that changes gradients mostly does so in every step."""


class DeviceGradientGuard:
    """The first elements of one gradient, before and after; used by the training thread and by
    backward's.

    Args:
        make_event: makes an event of the device that can be recorded and queried.
    """

    def __init__(self, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._make_event = make_event
        self._before: torch.Tensor | None = None
        self._told: deque[tuple[Any, torch.Tensor, int]] = deque()
        self._num_steps = 0

    def take(self, grad: torch.Tensor) -> None:
        """Remember a gradient as it is where the stream has come to, in some steps."""
        number = self._num_steps
        if number < FIRST_STEPS or number % EVERY_STEPS == 0:
            self._before = _first(grad).clone()

    def compare(self, index: int, grad: torch.Tensor) -> None:
        """Compare it with what it has become; the answer comes later."""
        before, self._before = self._before, None
        if before is None:
            return
        changed = (_first(grad) != before).any()
        if before.is_cuda:  # made on backward's stream, which may be another one
            before.record_stream(torch.cuda.current_stream())
        told = torch.empty((), dtype=torch.bool, pin_memory=grad.is_cuda)
        told.copy_(changed, non_blocking=True)
        event = self._make_event()
        event.record()
        self._told.append((event, told, index))

    def end_step(self) -> None:
        """What was remembered and not compared is forgotten."""
        self._before = None
        self._num_steps += 1

    def found(self) -> int | None:
        """The index of a gradient that was changed in some earlier step, as far as is known."""
        while self._told and self._told[0][0].query():
            _, told, index = self._told.popleft()
            if told:
                return index
        return None


def _first(grad: torch.Tensor) -> torch.Tensor:
    """Its first elements in memory, as bytes, which compare equal where NaN would not."""
    count = min(SAMPLED, grad.numel()) if grad.is_contiguous() else 1
    return torch.as_strided(grad.detach(), (count,), (1,)).view(torch.uint8)

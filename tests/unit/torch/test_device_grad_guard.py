"""Gradients on a device that were changed before they were averaged are noticed, later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from wfbp.torch.grad_guard import EVERY_STEPS, FIRST_STEPS, DeviceGradientGuard, GradientGuard

from wfbp.torch import grad_guard


class Event:
    """Happens when the test says so."""

    happened = False

    def record(self) -> None:
        """Nothing: the host computes at once."""

    def query(self) -> bool:
        return Event.happened


@pytest.fixture
def sample() -> DeviceGradientGuard:
    Event.happened = False
    return DeviceGradientGuard(Event)


def step(sample: DeviceGradientGuard, grad: torch.Tensor, change: bool = False) -> None:
    sample.take(grad)
    if change:
        grad.mul_(0.5)
    sample.compare(3, grad)
    sample.end_step()


def test_a_change_is_told_when_the_device_has_come_to_it(sample: DeviceGradientGuard) -> None:
    step(sample, torch.ones(5))
    step(sample, torch.ones(5), change=True)
    assert sample.changed_index() is None
    Event.happened = True
    assert sample.changed_index() == 3
    assert sample.changed_index() is None


def test_the_answer_comes_from_the_gradients_device() -> None:
    current: list[torch.Tensor] = []

    @contextmanager
    def on_device(grad: torch.Tensor) -> Iterator[None]:
        current.append(grad)
        yield
        current.pop()

    class OnDevice(Event):
        def __init__(self) -> None:
            self.made_on = [*current]

        def record(self) -> None:
            assert current == self.made_on != []

    grad = torch.ones(5)
    step(DeviceGradientGuard(OnDevice, on_device), grad)
    assert not current


def test_what_is_no_number_has_not_changed(sample: DeviceGradientGuard) -> None:
    Event.happened = True
    step(sample, torch.tensor([float("nan"), float("inf"), -0.0]))
    step(sample, torch.ones(4, 6).t())
    step(sample, torch.ones(40, dtype=torch.bfloat16))
    assert sample.changed_index() is None
    step(sample, torch.ones(4, 6).t(), change=True)
    assert sample.changed_index() == 3


def test_later_steps_are_looked_at_now_and_then(sample: DeviceGradientGuard) -> None:
    Event.happened = True
    seen = []
    for number in range(2 * EVERY_STEPS + 1):
        step(sample, torch.ones(3), change=True)
        if sample.changed_index() is not None:
            seen.append(number)
    assert seen == [*range(FIRST_STEPS), EVERY_STEPS, 2 * EVERY_STEPS]


def test_a_gradient_that_is_gone_is_not_compared(sample: DeviceGradientGuard) -> None:
    Event.happened = True
    sample.take(torch.ones(3))
    sample.end_step()
    sample.compare(3, torch.zeros(3))
    assert sample.changed_index() is None


def test_a_gradient_guard_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, with gradients of the host."""
    monkeypatch.setattr(grad_guard, "_is_elsewhere", lambda grad: True)
    monkeypatch.setattr(grad_guard, "DeviceGradientGuard", lambda: DeviceGradientGuard(Event))
    Event.happened = True
    param = torch.nn.Parameter(torch.ones(3))
    seen = GradientGuard("SGD", ["a"])
    for changed in (False, True):
        param.grad = torch.ones(3)
        seen.grads[0], seen.versions[0] = param.grad, param.grad._version
        seen.sample(0, param.grad)
        if changed:
            param.grad.data.mul_(0.5)  # leaves no version
        assert seen.check([param]) == []
        seen.clear()
    with pytest.raises(RuntimeError, match=r"SGD: the gradient of a was changed in place, some st"):
        seen.check([param])

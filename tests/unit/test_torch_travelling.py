"""Parameters on their way: changes are told, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from wfbp.torch.travelling import Travelling


def made(*params: torch.Tensor) -> Travelling:
    return Travelling(params, [f"p{k}" for k in range(len(params))])


def test_a_change_is_told_once() -> None:
    one, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    travelling = made(one, other)
    travelling.note([0, 1])
    with torch.no_grad():
        other.add_(1)
    travelling.arrived(0)
    with pytest.raises(RuntimeError, match="p1 was changed in place"):
        travelling.arrived(1)
    travelling.arrived(1)
    assert travelling.indices == []


def test_what_was_kept_for_backward_is_told() -> None:
    for changed in (True, False):
        param = torch.nn.Parameter(torch.ones(2))
        travelling = made(param)
        travelling.note([0], changed=[0] if changed else [])
        loss = param.square().sum()
        travelling.arrived(0)
        if changed:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        again = param.square().sum()
        travelling.arrived(0)
        again.backward()  # type: ignore[no-untyped-call]


def test_nothing_is_told_of_parts_of_one_tensor() -> None:
    """Nor where they are all of it, but twice."""
    whole = torch.ones(2, 3)
    for params in (whole.unbind(), (whole, whole)):
        travelling = made(*(torch.nn.Parameter(part.detach()) for part in params))
        travelling.note([0, 1], changed=[0, 1])
        assert travelling.indices == []
        assert travelling.together == [0, 1]
        whole.add_(1)
        travelling.arrived(0)
        travelling.arrived(1)


def test_what_is_noted_later_replaces_what_was_before() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    travelling = made(*params)
    travelling.note([0])
    with torch.no_grad():
        params[0].add_(1)
    travelling.note([1])
    travelling.arrived(0)
    assert travelling.indices == [1]


def test_without_autograd() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    travelling = made(param)
    for mode in (torch.no_grad(), torch.inference_mode()):
        travelling.note([0], changed=[0])
        with mode:
            travelling.arrived(0)

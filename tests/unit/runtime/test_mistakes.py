"""What a newcomer gets wrong: the message says what to do instead."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import wfbp
import wfbp.torch

pytestmark = pytest.mark.usefixtures("alone")


def wrap(kind: Any = torch.optim.SGD, *args: Any, **options: Any) -> Any:
    model = torch.nn.Linear(2, 1)
    return wfbp.torch.DistributedOptimizer(kind(model.parameters(), lr=0.1), *args, **options)


def test_parameters_without_names() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"pass model\.named_parameters\(\)"):
        wrap(torch.optim.SGD, model.parameters())


def test_a_module_for_named_parameters() -> None:
    with pytest.raises(TypeError, match=r"pass model\.named_parameters\(\)"):
        wrap(torch.optim.SGD, torch.nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"threshold_bytes": "25M"}, "threshold_bytes is '25M'; expected a whole number"),
        ({"threshold_bytes": True}, "threshold_bytes is True; expected a whole number"),
        ({"backward_passes_per_step": 1.5}, "backward_passes_per_step is 1.5; expected a whole"),
    ],
)
def test_what_is_no_whole_number(options: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError, match=re.escape(told)):
        wrap(**options)


def test_numpy_numbers_are_whole_numbers() -> None:
    wrap(threshold_bytes=np.int64(5), backward_passes_per_step=np.int32(1))


@pytest.mark.parametrize("specs", [[np.ones(2)], None, [("a",)], [(1, np.ones(2))]])
def test_a_reducer_of_what_has_no_names(specs: Any) -> None:
    with pytest.raises(TypeError, match="pairs of name and array, found"):
        wfbp.GradientReducer(specs)


@pytest.mark.parametrize("package", [wfbp, wfbp.torch])
def test_a_name_that_is_no_string(package: Any) -> None:
    value = np.ones(1) if package is wfbp else torch.ones(1)
    for act in (package.allreduce, package.allgather):
        with pytest.raises(TypeError, match="name is 3; expected a string"):
            act(value, name=3)


@pytest.mark.parametrize("package", [wfbp, wfbp.torch])
@pytest.mark.parametrize(
    "make",
    [
        lambda m: m,
        lambda m: torch.nn.ModuleDict({"m": m}),
    ],
)
def test_broadcast_of_a_model(package: Any, make: Any) -> None:
    with pytest.raises(TypeError, match=r"model\.state_dict\(\), model\.named_parameters\(\)"):
        package.broadcast_parameters(make(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("value", [3.0, [1.0, 2.0]])
def test_no_tensors(value: Any) -> None:
    for act in (wfbp.torch.allreduce, wfbp.torch.allreduce_, wfbp.torch.allgather):
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
            act(value)
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        wfbp.torch.broadcast(value, 0)


def test_gradients_of_a_reducer() -> None:
    reducer = wfbp.GradientReducer([("w1", np.zeros(2, np.float32))])
    wrong: Any = "w1"
    with pytest.raises(TypeError, match="'w1'; expected the gradient's number"):
        reducer.mark_ready(wrong, np.zeros(2, np.float32))
    tensor: Any = torch.zeros(2)
    with pytest.raises(TypeError, match="is a Tensor; expected a NumPy array"):
        reducer.mark_ready(0, tensor)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((-1.0,), "max_norm is -1.0; expected a number of at least 0"),
        ((None,), "max_norm is None"),
        ((torch.zeros(2),), "max_norm is a Tensor"),
        ((torch.nn.Linear(2, 2).parameters(), 1.0), "max_norm is a generator"),
    ],
)
def test_clipping_by_what_is_no_limit(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(told)) as caught:
        wrap().clip_grad_norm_(*arguments)
    assert "The optimizer knows its parameters" in str(caught.value)
    assert isinstance(caught.value, ValueError) is isinstance(arguments[0], float)


def test_clipping_by_what_is_no_norm() -> None:
    for wrong in (0.0, -1.0, float("nan"), "fro", None):
        with pytest.raises((TypeError, ValueError), match=r"norm_type is .* expected a number"):
            wrap().clip_grad_norm_(1.0, wrong)
    for limit in (0, 1, float("inf"), np.float32(2), torch.tensor(2.0)):
        assert wrap().clip_grad_norm_(limit) == 0


def test_schedules_that_are_spelled_wrong() -> None:
    with pytest.raises(ValueError, match=r"schedule is 'hybird' \(did you mean 'hybrid'\?\)"):
        wrap(schedule="hybird")


def test_who_needs_whole_gradients() -> None:
    with pytest.raises(ValueError, match="GradientReducer needs whole gradients"):
        wfbp.GradientReducer([("w", np.zeros(2))], schedule="hybrid")

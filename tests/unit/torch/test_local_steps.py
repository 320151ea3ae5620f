"""Arguments of local steps, and how a model is cut."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wfbp.torch as hvd
from wfbp.torch.local_steps import _cuts


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20), st.data())
def test_no_part_is_empty(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)), "parts")
    cuts = _cuts(sizes, count)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, len(sizes), count + 1)
    assert all(first < last for first, last in pairwise(cuts))


def test_parts_are_about_equal() -> None:
    assert _cuts([5] * 12, 4) == [0, 3, 6, 9, 12]
    assert _cuts([1, 1, 1, 1, 90, 2, 2, 2], 2) == [0, 5, 8]


@pytest.fixture
def adam() -> torch.optim.Optimizer:
    return torch.optim.Adam(torch.nn.Linear(3, 2).parameters())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"every": 0}, "every: expected a whole number from 1 to"),
        ({"every": 2.0}, "found 2.0"),
        (
            {"fragments": 3},
            "fragments (at most every, and one per parameter): expected a whole number from 1 to 2",
        ),
        (
            {"every": 8, "fragments": 2, "delay": 4},
            "delay (fewer than every / fragments): expected a whole number from 0 to 3",
        ),
        ({"fragments": 1, "delay": -1}, "found -1"),
        ({"fragments": 1, "outer": "adam"}, "outer is 'adam'; expected nesterov, sgd"),
        ({"fragments": 1, "compression": "auto:int8"}, "LocalSteps needs one without auto"),
        ({"fragments": 1, "compression": "int3"}, "int3"),
    ],
)
def test_bad_arguments(adam: Any, options: Any, told: str, alone: None) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        hvd.LocalSteps(adam, **options)


def test_optimizers_that_cannot_have_it(adam: Any, alone: None) -> None:
    other = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
    hvd.LocalSteps(adam, fragments=1)
    with pytest.raises(ValueError, match="has LocalSteps, which average"):
        hvd.LocalSteps(adam, fragments=1)
    with pytest.raises(TypeError, match="averages gradients in every step"):
        hvd.LocalSteps(hvd.DistributedOptimizer(other))


def test_what_may_not_happen_later(adam: Any, alone: None) -> None:
    local = hvd.LocalSteps(adam, fragments=1)
    adam.register_step_pre_hook(lambda *_: None)
    adam.step()
    with local.averaged(), pytest.raises(RuntimeError, match=r"within LocalSteps\.averaged"):
        adam.step()
    state = local.state_dict()
    state["fragments"][0]["names"].pop()
    with pytest.raises(ValueError, match="differs in parameters"):
        local.load_state_dict(state)
    adam.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match=r"parameter of shape \(2,\) since LocalSteps"):
        adam.step()

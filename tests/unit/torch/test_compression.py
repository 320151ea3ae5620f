"""Compression of gradients by name: rules, and exempt tensors."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from wfbp.core.types import TensorSpec
from wfbp.runtime.arguments import ReducerOptions
from wfbp.torch.compression import Compression, wires_of

LARGE = (64, 64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 100)


def sent(compression: Any, chosen: str = "") -> dict[str, str]:
    """The type in which two ranks send each parameter's gradient, by a plan that chose one."""
    model = Model()
    named = list(model.named_parameters())
    wire, wires = wires_of(compression, named)
    options = ReducerOptions("oasr", 1, wire=wire, wires=wires)
    specs = [TensorSpec(name, tuple(p.shape), "float32") for name, p in named]
    return {spec.name: options.wire_of(spec, 2, chosen) for spec in specs}


def test_one_name_for_all() -> None:
    assert set(sent("none").values()) == {""}
    assert set(sent("bf16").values()) == {"bfloat16"}
    assert sent(Compression.fp16) == sent("fp16")
    assert sent(Compression.int8) == sent("int8")
    with pytest.raises(ValueError, match="for gradients of a DistributedOptimizer"):
        Compression.int8.compress(torch.ones(2))


def test_exempt_from_encoding() -> None:
    weights = {"body.weight": "int8", "head.weight": "int8"}
    biases = {"words.weight": "", "body.bias": "", "head.bias": ""}
    assert sent("int8") == weights | biases


def test_embeddings_are_found_after_gc_freeze() -> None:
    model = Model()
    gc.freeze()
    try:
        _, wires = wires_of("int8", list(model.named_parameters()))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert ("words.weight", "") in wires


def test_a_choice_of_the_plan() -> None:
    for chosen, name in (("", "none"), ("bfloat16", "bf16"), ("int8", "int8")):
        assert sent("auto:int8", chosen) == sent(name) | {"words.weight": ""}
    assert sent("auto:bf16", "int8") == sent("bf16")
    head = {"head.weight": "bfloat16", "head.bias": "bfloat16"}
    assert sent({"head.*": "bf16", "*": "auto:int8"}, "int8") == sent("int8") | head
    assert ReducerOptions("oasr", 1, wire="int8").choices == ("",)
    assert ReducerOptions("oasr", 1, wires=(("a", "auto:int8"),)).choices[-1] == "int8"


def test_rules() -> None:
    found = sent({"words.*": "int8", "head.*": Compression.bf16, "*": "int8"})
    heads = {"head.weight": "bfloat16", "head.bias": "bfloat16"}
    assert found == {"words.weight": "int8", "body.weight": "int8", "body.bias": ""} | heads
    only = sent({"body.*": "int8"})
    assert only == dict.fromkeys(only, "") | {"body.weight": "int8"}


@pytest.mark.parametrize(
    ("compression", "found"),
    [
        ("int3", r"compression is 'int3'; expected one of 'none', 'fp16', 'bf16', 'int8'"),
        (nn.Linear, "compression is Linear; expected"),
        (None, "compression is None; expected"),
        ({"*": 8}, "compression is 8; expected"),
        (
            {"tail.*": "int8"},
            r"a rule for 'tail.\*', which matches no name; there",
        ),
    ],
)
def test_errors(compression: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        sent(compression)


@pytest.mark.parametrize(
    ("spec", "ranks", "wire"),
    [
        (TensorSpec("w", LARGE, "float32"), 2, "int8"),
        (TensorSpec("w", LARGE, "float32"), 4, "int8"),
        (TensorSpec("w", LARGE, "float32"), 5, ""),  # less than 4 KiB per rank
        (TensorSpec("w", LARGE, "float32"), 1, ""),
        (TensorSpec("w", (4096,), "float32"), 2, ""),
        (TensorSpec("w", LARGE, "float64"), 2, ""),
        (TensorSpec("w", LARGE, "bfloat16"), 2, ""),
        (TensorSpec("w", LARGE, "complex64"), 2, ""),
    ],
)
def test_what_can_be_encoded(spec: TensorSpec, ranks: int, wire: str) -> None:
    assert ReducerOptions("oasr", 1, wire="int8").wire_of(spec, ranks, "") == wire

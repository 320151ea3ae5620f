"""The benchmark's models have the sizes that its figures are stated for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.benchmarks.models import MODELS  # noqa: E402

SIZES = {
    "mlp": (120, 3_947_520),
    "resnet50": (161, 25_557_032),
    "gpt": (149, 27_634_944),
    "vgg16": (32, 43_985_704),
    "lstm": (11, 6_828_032),
    "densenet": (364, 7_978_856),
}


def test_every_model_has_a_stated_size() -> None:
    assert set(MODELS) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_counts(name: str) -> None:
    with torch.device("meta"):
        parameters = list(MODELS[name].build().parameters())
    assert (len(parameters), sum(p.numel() for p in parameters)) == SIZES[name]

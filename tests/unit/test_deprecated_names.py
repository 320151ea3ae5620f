"""Public names of the version before work, and say once what they are called now."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import wfbp
from wfbp import deprecation


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "_warned", set())


@pytest.fixture
def alone() -> Iterator[None]:
    wfbp.init()
    yield
    wfbp.shutdown()


@pytest.mark.usefixtures("alone")
def test_update_became_optimizer_sharding() -> None:
    torch = pytest.importorskip("torch")
    import wfbp.torch as hvd

    def parameters() -> list[torch.Tensor]:
        return [torch.nn.Parameter(torch.zeros(2))]

    with pytest.warns(DeprecationWarning, match="update='sharded'.* use optimizer_sharding=True"):
        hvd.DistributedOptimizer(torch.optim.SGD(parameters(), lr=0.1), update="sharded")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        hvd.DistributedOptimizer(torch.optim.SGD(parameters(), lr=0.1), update="sharded")
    with pytest.raises(ValueError, match="update is 'both'; expected one of"):
        hvd.DistributedOptimizer(torch.optim.SGD(parameters(), lr=0.1), update="both")
    with pytest.raises(ValueError, match="optimizer_sharding is 1; expected True, False or None"):
        hvd.DistributedOptimizer(torch.optim.SGD(parameters(), lr=0.1), optimizer_sharding=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="update and optimizer_sharding"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(parameters(), lr=0.1), update="auto", optimizer_sharding=True
        )

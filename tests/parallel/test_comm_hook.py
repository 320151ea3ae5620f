"""Hooks of DistributedDataParallel that send fewer bits train with the bits of the optimizer."""

from __future__ import annotations

import pytest

from tests.parallel.runs import outcome

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_hooks(ranks: int) -> None:
    found = outcome("torch/comm_hook", ranks, timeout=280.0)
    assert found.run.rc == 0, found.run
    for told in found.ranks:
        assert "called different operations" in told.pop("codecs") or ranks == 2
    assert all(told == found.ranks[0] for told in found.ranks), found.ranks
    told = found.ranks[0]
    digests = {name: set(told[name].values()) for name in ("none", "bf16", "int8", "fp8", "int4")}
    assert all(len(each) == 1 for each in digests.values()), told
    assert len(set.union(*digests.values())) == 5
    assert "needs one name, without auto" in told["auto"]
    assert "needs one name, without auto" in told["rules"]
    assert "call comm_hook() for each model" in told["two models"]
    assert told["sparse"] is True
    assert told["after infinity"] < 0.1
    assert told["state"].startswith("TypeError: wfbp's hook was given 'a group'")

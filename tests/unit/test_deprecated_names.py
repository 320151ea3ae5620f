"""Public names of the version before work, and say once what they are called now."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

import wfbp
from wfbp import deprecation
from wfbp.config import RENAMED, Config, unknown_variables


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "_warned", set())


@pytest.fixture
def alone() -> Iterator[None]:
    wfbp.init()
    yield
    wfbp.shutdown()


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_settings_are_read_and_told_of(old: str, new: str) -> None:
    plain = {"direct_bytes": "4K", "run_dir": "runs"}.get(old, "0.5")
    environment = {f"WFBP_{old.upper()}": plain}
    read = Config.from_environment(environment)
    assert read == Config.from_environment({f"WFBP_{new.upper()}": plain}) != Config()
    told = unknown_variables(environment)
    assert told == f"WFBP_{old.upper()} is deprecated: use WFBP_{new.upper()}"
    value = getattr(read, new)
    with pytest.warns(DeprecationWarning, match=rf"Config\({old}=\).* use Config\({new}=\)"):
        assert Config(**{old: value}) == read
    with pytest.warns(DeprecationWarning, match=f"Config.{old} .* use Config.{new}"):
        assert getattr(read, old) == value


def test_an_old_and_a_new_variable_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"WFBP_DRIFT and WFBP_REPLAN_THRESHOLD are both set"):
        Config.from_environment({"WFBP_DRIFT": "0", "WFBP_REPLAN_THRESHOLD": "1"})
    with pytest.raises(TypeError, match="drift and replan_threshold"):
        Config(drift=0.1, replan_threshold=0.2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no attribute 'drifted'"):
        Config().drifted  # type: ignore[attr-defined]  # noqa: B018


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

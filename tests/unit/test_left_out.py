"""Names of Horovod's that are left out."""

from __future__ import annotations

import pytest

import wfbp.horovod.torch as hvd
from wfbp.horovod import INSTEAD


@pytest.mark.parametrize("module", [hvd, hvd.elastic], ids=lambda module: module.__name__)
def test_a_name_that_is_left_out_says_what_to_use(module: object) -> None:
    for name in INSTEAD.keys() - set(vars(module)):
        with pytest.raises(AttributeError) as caught:
            getattr(module, name)
        assert INSTEAD[name] in str(caught.value)
    with pytest.raises(AttributeError, match="has no attribute 'alreduce'"):
        module.alreduce  # type: ignore[attr-defined]  # noqa: B018


def test_nothing_that_exists_is_said_to_be_left_out() -> None:
    assert not INSTEAD.keys() & set(vars(hvd))
    assert not INSTEAD.keys() & set(vars(hvd.elastic))

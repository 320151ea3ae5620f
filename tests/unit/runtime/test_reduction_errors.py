"""Reductions whose ranks disagree, stay away or leave."""

from __future__ import annotations

import pytest

from tests.support.ranks import all_well, run_ranks
from tests.support.trainer import Trainer, make_specs
from wfbp.errors import PeerError
from wfbp.runtime.runtime import Runtime


@pytest.mark.usefixtures("short_grace")
def test_the_first_error_is_raised_again() -> None:
    def body(runtime: Runtime) -> list[str]:
        trainer = Trainer(runtime, make_specs([3]))
        if runtime.rank == 1:
            return []
        texts = []
        for _ in range(3):
            trainer.accumulate(0, 1.0)
            with pytest.raises(PeerError) as caught:
                trainer.synchronize()
            texts.append(str(caught.value))
        with pytest.raises(PeerError):
            runtime.channel.exchange(b"", "more")
        return texts

    texts = all_well(run_ranks(2, body))[0]
    assert len(set(texts)) == 1

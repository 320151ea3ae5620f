"""Reductions whose ranks disagree, stay away or leave."""

from __future__ import annotations

import re
import threading

import pytest

from tests.support.ranks import all_well, limit_waits, run_ranks
from tests.support.trainer import Trainer, make_specs
from wfbp.config import Config
from wfbp.errors import DisagreementError, PeerError, StallError
from wfbp.runtime.runtime import Runtime


def test_ranks_with_other_tensors_or_settings() -> None:
    def body(runtime: Runtime) -> None:
        Trainer(runtime, make_specs([3, 4 + (runtime.rank == 2)]), name="mine")

    for rank, result in enumerate(run_ranks(3, body)):
        assert isinstance(result, DisagreementError)
        told = "ranks disagree on t1 (ranks 0, 1: float64(4,); rank 2: float64(5,)). Every rank"
        assert str(result).startswith(f"rank {rank} of 3: mine: comparing tensors: {told}")


def test_ranks_of_other_classes() -> None:
    def body(runtime: Runtime) -> None:
        kind = "torch.optim.SGD" if runtime.rank else "torch.optim.Adam"
        Trainer(runtime, make_specs([3]), compared={"the optimizer's class": kind})

    for result in run_ranks(2, body):
        assert isinstance(result, DisagreementError)
        assert "class (rank 0: torch.optim.Adam; rank 1: torch.optim.SGD)" in str(result)


def test_a_rank_that_stays_away_stalls_the_others() -> None:
    config = Config(schedule="layerwise", warmup_steps=10, abort_grace_s=0.5)
    over = threading.Event()

    def body(runtime: Runtime) -> None:
        trainer = Trainer(runtime, make_specs([3, 4]), schedule="layerwise")
        if runtime.rank == 1:
            over.wait(60.0)
            return
        limit_waits(runtime, timeout_s=1.0, stall_warning_s=0.3)
        trainer.accumulate(1, 1.0)
        try:
            trainer.synchronize()
        finally:
            over.set()

    result = run_ranks(2, body, config)[0]
    assert isinstance(result, StallError)
    place = r"optimizer, step 0: all-reduce of group 1 of 2 \(t1\) is under way"
    assert re.search(rf"rank 0 of 2 waited [1-9]\d* s \({place}\)", str(result)), result
    assert "WFBP_TIMEOUT_S" in str(result)


@pytest.mark.usefixtures("short_grace")
def test_a_rank_that_leaves_is_named() -> None:
    def body(runtime: Runtime) -> None:
        trainer = Trainer(runtime, make_specs([3]))
        if runtime.rank == 0:
            trainer.accumulate(0, 1.0)
            trainer.synchronize()

    left = run_ranks(2, body)[0]
    assert isinstance(left, PeerError)
    assert "rank 1 has left" in str(left)


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

"""Ranks that wait for each other in different places are told so; those that are slow are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import all_well, limit_waits, run_ranks
from tests.support.trainer import Trainer, make_specs
from wfbp.config import Config
from wfbp.core.types import Op
from wfbp.errors import DisagreementError, StallError
from wfbp.runtime.consistency import check_consistent
from wfbp.runtime.progress.stall import ALL_RANKS, RankStatus, StallWatch
from wfbp.runtime.runtime import Runtime

PROMPT = Config(
    schedule="layerwise", warmup_steps=10**6, stall_warning_s=0.2, timeout_s=60.0, abort_grace_s=0.5
)


def barrier(runtime: Runtime, trainer: Trainer) -> None:
    check_consistent(runtime, "barrier")


def step(runtime: Runtime, trainer: Trainer) -> None:
    for index in range(2):
        trainer.accumulate(index, 1.0)
    trainer.synchronize()


HERE = RankStatus("idle", False, 0, 0)
Act = Callable[[Runtime, Trainer], None]


def ended(acts: dict[int, Act], config: Config = PROMPT, size: int = 3) -> list[Any]:
    """What becomes of ranks that each do their own."""

    def body(runtime: Runtime) -> None:
        trainer = Trainer(runtime, make_specs([3, 4]), schedule="layerwise", name="SGD")
        step(runtime, trainer)
        acts.get(runtime.rank, step)(runtime, trainer)

    return run_ranks(size, body, config)


@pytest.mark.parametrize("odd", [0, 2])
def test_a_collective_on_one_rank_alone(odd: int) -> None:
    for rank, result in enumerate(ended({odd: barrier})):
        assert isinstance(result, DisagreementError), result
        text = str(result)
        assert text.startswith(f"rank {rank} of 3: ranks wait for each other in different places:")
        assert f"rank {odd}: in barrier" in text
        assert "SGD, step 1: all-reduce of group" in text
        assert "Every rank must make the same calls" in text


def test_a_collective_of_an_optimizer_on_one_rank_alone() -> None:
    def norm(runtime: Runtime, trainer: Trainer) -> None:
        zero, label = np.zeros(1), "clip_grad_norm_()"
        runtime.channel.call(lambda b: b.all_reduce(zero, "float64", Op.SUM), label)

    for result in ended({1: norm}, size=2):
        assert isinstance(result, DisagreementError), result
        assert "rank 1: in clip_grad_norm_()" in str(result)


def test_two_optimizers_in_another_order() -> None:
    def body(runtime: Runtime) -> None:
        trainers = [
            Trainer(runtime, make_specs([3, 4]), schedule="layerwise", name=n) for n in ("G", "D")
        ]
        for trainer in trainers if runtime.rank else reversed(trainers):
            step(runtime, trainer)

    for result in run_ranks(2, body, PROMPT):
        assert isinstance(result, DisagreementError), result
        assert "rank 0: " in str(result)
        assert "D, step 0: all-reduce" in str(result)


def test_a_slow_rank_is_waited_for() -> None:
    def late(runtime: Runtime, trainer: Trainer) -> None:
        time.sleep(1.0)
        step(runtime, trainer)

    all_well(ended({1: late}))


def test_a_rank_that_waits_for_something_else_is_not_judged() -> None:
    over = threading.Event()

    def elsewhere(runtime: Runtime, trainer: Trainer) -> None:
        over.wait(60.0)

    def waits(runtime: Runtime, trainer: Trainer) -> None:
        watch = runtime.thread.loop.watch

        def lose_patience() -> None:
            while not watch._answers:
                time.sleep(1e-3)
            limit_waits(runtime, timeout_s=0.1)

        threading.Thread(target=lose_patience, daemon=True).start()
        try:
            step(runtime, trainer)
        finally:
            over.set()

    result = ended({0: waits, 1: elsewhere}, size=2)[0]
    assert isinstance(result, StallError)
    assert "other ranks were here: rank 1: SGD, step 1: nothing posted yet." in str(result)
    assert "No answer" not in str(result)


def test_ranks_that_do_not_answer_are_named() -> None:
    asker = StallWatch(0, 4, PROMPT, "rank 0 of 4", lambda notice: None)
    assert not asker.answers
    assert asker.check([(0.0, "barrier", ALL_RANKS)], 1.0, 1.0) is None
    assert asker.answers.startswith("No answer came from ranks 1, 2, 3: stopped, killed")
    answer = {"kind": "here", "to": 0, "number": 1, "status": asdict(HERE)}
    asker.handle_notice(2, answer, HERE)
    assert asker.answers.startswith(
        "When asked, other ranks were here: rank 2: idle. No answer came from ranks 1, 3: "
    )


def test_ranks_are_in_a_deadlock_if_nothing_changed_between_two_answers() -> None:
    """Not if they are in the same place, one of them computes, or something has moved."""
    here, there = RankStatus("SGD", True, 3, 7), RankStatus("in barrier", True, 3, 7)

    def judge(own: RankStatus, first: RankStatus, second: RankStatus) -> Any:
        sent: list[Any] = []
        watch = StallWatch(0, 2, Config(timeout_s=1e4), "rank 0 of 2", sent.append)
        error = None
        for now in range(100):
            assert watch.check([(0.0, own.place, ALL_RANKS)], now, 0.1) is None
            if sent and sent[-1]["kind"] == "where":
                number = sent[-1]["number"]
                status = asdict(first if number == 1 else second)
                answer = {"kind": "here", "to": 0, "number": number, "status": status}
                sent.append({"kind": "answered"})
                error = error or watch.handle_notice(1, answer, own)
        assert (sent[-1]["kind"] == "deadlock") is (error is not None)
        return error

    assert "rank 0: SGD; rank 1: in barrier. Every" in str(judge(here, there, there))
    assert judge(here, here, here) is None
    assert judge(here, replace(there, blocked=False), replace(there, blocked=False)) is None
    assert judge(here, there, replace(there, activity=8)) is None
    assert judge(here, there, replace(there, num_waits=4)) is None


def test_nothing_is_judged_where_other_threads_may_go_on() -> None:
    def threaded(runtime: Runtime, trainer: Trainer) -> None:
        runtime.expect_other_threads()
        barrier(runtime, trainer)

    config = Config(schedule="layerwise", stall_warning_s=0.2, timeout_s=1.0, abort_grace_s=0.5)
    for result in ended({1: threaded}, config, size=2):
        assert isinstance(result, StallError)

"""Ranks that wait for each other in different places are told so; those that are slow are not."""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import all_well, run_ranks
from tests.support.trainer import Trainer, make_specs
from wfbp.config import Config
from wfbp.errors import DisagreementError, StallError
from wfbp.runtime.progress.loop import num_program_threads
from wfbp.runtime.progress.stall import ALL_RANKS, Need, RankStatus, StallWatch, deadlocked
from wfbp.runtime.runtime import Runtime

PROMPT = Config(
    schedule="layerwise", warmup_steps=10**6, stall_warning_s=0.2, timeout_s=60.0, abort_grace_s=0.5
)


def barrier(runtime: Runtime, trainer: Trainer) -> None:
    runtime.channel.exchange(b"", "barrier")


def step(runtime: Runtime, trainer: Trainer) -> None:
    for index in range(2):
        trainer.accumulate(index, 1.0)
    trainer.synchronize()


HERE = RankStatus("idle", False)
Act = Callable[[Runtime, Trainer], None]


def ended(acts: dict[int, Act], config: Config = PROMPT, size: int = 3) -> list[Any]:
    """What becomes of ranks that each do their own."""

    def body(runtime: Runtime) -> None:
        trainer = Trainer(runtime, make_specs([3, 4]), schedule="layerwise", name="SGD")
        step(runtime, trainer)
        acts.get(runtime.rank, step)(runtime, trainer)

    return run_ranks(size, body, config)


def test_a_collective_on_one_rank_alone() -> None:
    odd = 2
    for rank, result in enumerate(ended({odd: barrier})):
        assert isinstance(result, DisagreementError), result
        text = str(result)
        assert text.startswith(f"rank {rank} of 3: ranks wait for each other in different places:")
        assert f"rank {odd}: in barrier" in text
        assert "SGD, step 1: all-reduce of group" in text
        assert "Every rank must make the same calls" in text


def test_a_slow_rank_is_waited_for() -> None:
    def late(runtime: Runtime, trainer: Trainer) -> None:
        time.sleep(1.0)
        step(runtime, trainer)

    all_well(ended({1: late}))


def test_ranks_that_do_not_answer_are_named() -> None:
    asker = StallWatch(0, 4, PROMPT, "rank 0 of 4", lambda *notice: None)
    assert not asker.answers
    assert asker.check([(0.0, "barrier", ALL_RANKS)], 1.0, 1.0) is None
    assert asker.answers.startswith("No answer came from ranks 1, 2, 3: stopped, killed")
    asker.handle_notice("here", 2, {"number": 1, "status": asdict(HERE)}, HERE)
    assert asker.answers.startswith(
        "When asked, other ranks were here: rank 2: idle. No answer came from ranks 1, 3: "
    )


def test_ranks_are_in_a_deadlock_if_nothing_changed_between_two_answers() -> None:
    """Not if one of them computes, or what it waits for was begun by all."""
    ahead, behind = {"a": 4, "b": 0}, {"a": 3, "b": 1}
    here = RankStatus("SGD", True, 3, ahead, [Need(None, {"a": 4})])
    there = RankStatus("in barrier", True, 3, behind, [Need(None, {"b": 1})])

    def judge(own: RankStatus, first: RankStatus, second: RankStatus) -> Any:
        sent: list[Any] = []
        watch = StallWatch(0, 2, Config(timeout_s=1e4), "rank 0 of 2", lambda *n: sent.append(n))
        error = None
        for now in range(100):
            assert watch.check([(0.0, own.place, ALL_RANKS)], now, 0.1) is None
            if sent and sent[-1][0] == "where":
                number = sent[-1][1]
                status = json.loads(json.dumps(asdict(first if number == 1 else second)))
                answer = {"number": number, "status": status}
                sent.append(("answered",))
                error = error or watch.handle_notice("here", 1, answer, own)
        assert (sent[-1][0] == "deadlock") is (error is not None)
        return error

    assert "rank 0: SGD; rank 1: in barrier. Every" in str(judge(here, there, there))
    for other in (
        here,  # both are in one operation, whose bytes may be under way
        replace(there, begun={"a": 4, "b": 1}),  # here it ends, however long it takes
        replace(there, blocked=False),
        replace(there, needs=None),
    ):
        assert judge(here, other, other) is None, other
    assert judge(here, there, replace(there, begun=behind | {"c": 1})) is None
    assert judge(here, there, replace(there, num_waits=4)) is None


def test_a_deadlock_of_some_ranks_does_not_need_the_others() -> None:
    def waits(name: str, ranks: list[int] | None, **begun: int) -> RankStatus:
        return RankStatus(name, True, 1, begun, [Need(ranks, {name: 1})])

    computes = RankStatus("idle", False)
    pair = {0: waits("a", [0, 1], a=1), 1: waits("b", [0, 1], b=1)}
    assert deadlocked(pair | {2: computes}) == {0, 1}
    assert deadlocked(pair | {2: waits("c", None, c=1)}) == {0, 1, 2}
    assert deadlocked(pair | {1: waits("b", [1, 2], b=1), 2: computes}) == set()
    ring = {
        rank: waits("abc"[rank], [rank, (rank + 1) % 3], **{"abc"[rank]: 1}) for rank in range(3)
    }
    assert deadlocked(ring) == {0, 1, 2}
    # Of two operations under way, one may end.
    needs = [Need([0, 1], {"a": 1}), Need([0, 2], {"d": 1})]
    both = replace(pair[0], begun={"a": 1, "d": 1}, needs=needs)
    assert deadlocked(pair | {0: both, 2: computes}) == set()
    # A name that rank 1 does not have: it may have had it, and heard the answer before.
    name = Need(None, {"x": 1, "joined": 1}, {"answers": 2})
    asks = RankStatus("x", True, 1, {"x": 1, "answers": 2}, [name])
    other = waits("b", None, b=1, answers=2)
    assert deadlocked({0: asks, 1: other}) == {0, 1}
    assert deadlocked({0: asks, 1: replace(other, begun={"b": 1, "answers": 3})}) == set()
    assert (
        deadlocked({0: asks, 1: replace(other, begun={"b": 1, "joined": 1, "answers": 2})}) == set()
    )


def test_threads_of_the_program_are_counted_before_they_communicate() -> None:
    before, over = num_program_threads(), threading.Event()
    helpers = ("wfbp-comm", "tqdm_monitor", "QueueFeederThread")  # which never communicate
    threads = [threading.Thread(target=over.wait, name=n) for n in ("loader", *helpers)]
    for thread in threads:
        thread.start()
    try:
        assert num_program_threads() == before + 1
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_threads_of_libraries_that_never_communicate_are_not_counted(tmp_path: Path) -> None:
    """Else a progress bar, a loader with workers or a log of TensorBoard hides every deadlock."""
    before, num_frames = num_program_threads(), len(sys._current_frames())
    writer = pytest.importorskip("tensorboardX").SummaryWriter(str(tmp_path))
    queue: Any = multiprocessing.Queue()
    try:
        writer.add_scalar("loss", 1.0, 1)
        queue.put(1)
        assert len(sys._current_frames()) > num_frames
        assert num_program_threads() == before
    finally:
        writer.close()
        queue.get()
        queue.close()
        queue.join_thread()


def test_nothing_is_judged_where_other_threads_may_go_on() -> None:
    def threaded(runtime: Runtime, trainer: Trainer) -> None:
        runtime.expect_other_threads()
        barrier(runtime, trainer)

    config = Config(schedule="layerwise", stall_warning_s=0.2, timeout_s=1.0, abort_grace_s=0.5)
    for result in ended({1: threaded}, config, size=2):
        assert isinstance(result, StallError)

"""The communication thread: calls, lanes, errors, and ranks that lag or leave."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.local import LocalWorld
from wfbp.comm.backend import Backend, Finished, Work
from wfbp.config import Config
from wfbp.errors import DisagreementError, PeerError, StallError, WfbpError
from wfbp.runtime.progress.loop import Expected, ProgressLoop, Reply
from wfbp.runtime.progress.stall import Members, Need
from wfbp.runtime.progress.thread import THREAD_NAME, CommunicationThread


class Slow(Work[str]):
    """Completes once it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None

    def test(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.go.is_set()

    @property
    def result(self) -> str:
        return "done"


class StubLane:
    """A lane that counts its turns."""

    backend: Backend = LocalWorld(1).backend(0)

    def __init__(self) -> None:
        self.turns = 0
        self.busy = False
        self.is_idle = False
        self.has_events = False
        self.owes_work = False
        self.has_room = True
        self.expected = Expected()
        self.waiting_since: float | None = None
        self.error: WfbpError | None = None
        self.trouble: Exception | None = None
        self.polls = True

    def advance(self) -> bool:
        self.turns += 1
        if self.trouble is not None:
            raise self.trouble
        return False

    def needs(self, members: Members) -> list[Need] | None:
        return None

    def describe(self) -> str:
        return "stub lane"

    def fail(self, error: WfbpError) -> None:
        self.error = error


Make = Callable[..., CommunicationThread]


@pytest.fixture
def make() -> Iterator[Make]:
    """Threads that are stopped behind the test."""
    made = []

    def thread(**settings: Any) -> CommunicationThread:
        backend = LocalWorld(1).backend(0)
        made.append(CommunicationThread(backend, Config(**settings), "rank 0 of 2"))
        made[-1].start()
        return made[-1]

    yield thread
    for each in made:
        each.stop(timeout_s=60.0)


def in_thread(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Another training thread; its result or error appears in the list."""
    found: list[Any] = []

    def body() -> None:
        try:
            found.append(act())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, found


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


# Calls.


def test_calls_run_one_after_another_in_their_order(make: Make) -> None:
    thread, works, started = make(), [Slow(), Slow()], []

    def start(k: int) -> Slow:
        started.append(k)
        return works[k]

    callers = []
    for k in range(2):
        callers.append(in_thread(lambda k=k: thread.call(lambda: start(k), f"call {k}")))
        if k == 0:
            until(lambda: started)
    time.sleep(0.05)
    assert started == [0]
    works[0].go.set()
    until(lambda: started == [0, 1])
    works[1].go.set()
    for caller, found in callers:
        caller.join(60)
        assert found == ["done"]


def test_calls_of_different_queues_do_not_wait_for_each_other(make: Make) -> None:
    thread, slow = make(), Slow()
    caller, found = in_thread(lambda: thread.call(lambda: slow, "slow", queue_key="one"))
    until(lambda: thread.loop.describe() == "in slow")
    assert thread.call(lambda: Finished(7), "seven", queue_key="other") == 7
    assert found == []
    slow.go.set()
    caller.join(60)
    assert found == ["done"]


@pytest.mark.parametrize("polls", [False, True])
def test_who_waits_for_a_lane_sleeps_in_the_backend(
    make: Make, monkeypatch: pytest.MonkeyPatch, polls: bool
) -> None:
    """It looks for what has arrived without the interpreter; the thread beside it does not. Nor
    where a lane has more to look for."""
    thread, lane, reply = make(), StubLane(), Reply[int]()
    names: list[str] = []

    def rest(nap_s: float, most_s: float) -> bool:
        assert 0 <= nap_s <= most_s < 0.1
        names.append(threading.current_thread().name)
        reply.put(7)
        return True

    monkeypatch.setattr(thread.loop._backend, "rest", rest)
    monkeypatch.setattr(thread.loop._backend, "rests", True)
    lane.busy, lane.polls = True, polls
    thread.post(lambda: thread.loop.add_lane(lane))
    if polls:
        threading.Timer(0.1, reply.put, [7]).start()
    assert thread.await_reply(reply, "the lane") == 7
    assert names == ([] if polls else ["MainThread"])


def test_who_waits_drives(make: Make) -> None:
    """A call runs on the thread that waits for it, and one that comes meanwhile is not lost."""

    def caller_drives() -> bool:
        thread, slow = make(), Slow()
        names: list[str] = []

        def start(work: Work[Any]) -> Work[Any]:
            names.append(threading.current_thread().name)
            return work

        caller, found = in_thread(lambda: thread.call(lambda: start(slow), "driving"))
        until(lambda: len(names) == 1)
        other, _ = in_thread(lambda: thread.call(lambda: start(Finished(1)), "behind it"))
        time.sleep(0.02)
        slow.go.set()
        for each in (caller, other):
            each.join(60)
        assert found == ["done"]
        assert len(names) == 2
        return names[0] == caller.name

    until(caller_drives)  # the communication thread does it where it was about to


def test_an_answer_that_has_come_is_taken_while_another_turn_lasts(make: Make) -> None:
    thread = make()
    entered, over, ended = threading.Event(), threading.Event(), threading.Event()

    def last() -> None:
        entered.set()
        over.wait(60.0)
        ended.set()

    thread.post(last)
    assert entered.wait(60.0)
    reply: Reply[str] = Reply()
    reply.put("here")
    try:
        assert thread.await_reply(reply, "an answer") == "here"
        assert not ended.is_set()
        assert thread.is_used_here
    finally:
        over.set()


def test_a_forked_process_is_not_held_up_by_a_turn_of_its_parent(make: Make) -> None:
    """As if forked: there the turn under way would never end."""
    thread = make()
    entered, over = threading.Event(), threading.Event()

    def last() -> None:
        entered.set()
        over.wait(60.0)

    thread.post(last)
    assert entered.wait(60.0)
    thread.fail_in_fork(WfbpError("no rank"))
    try:
        waiting, found = in_thread(lambda: thread.await_reply(Reply(), "an answer"))
        waiting.join(30.0)
        assert [str(error) for error in found] == ["no rank"]
    finally:
        over.set()


def test_an_interrupt_while_driving_ends_the_runtime(make: Make) -> None:
    thread = make()

    def interrupted() -> Work[None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        thread.call(interrupted, "long")
    with pytest.raises(WfbpError, match="rank 0 of 2: interrupted while it communicated"):
        thread.call(lambda: Finished(1), "next")


def test_an_interrupt_while_another_drives_ends_the_runtime_too(make: Make) -> None:
    class Interrupted(Reply[None]):
        def wait(self, timeout_s: float) -> bool:
            raise KeyboardInterrupt

    thread, started = make(), []

    def start() -> Slow:
        started.append(Slow())
        return started[0]

    caller, found = in_thread(lambda: thread.call(start, "driving"))
    until(lambda: started)
    with pytest.raises(KeyboardInterrupt):
        thread.await_reply(Interrupted(), "beside it")
    caller.join(60)
    assert "rank 0 of 2: interrupted while it communicated" in str(found[0])


@pytest.mark.parametrize("comes", [True, False])
def test_who_waits_beside_a_driver_counts_no_time_of_a_suspended_job(
    make: Make, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    class Late(Reply[int]):
        looks = 0

        def wait(self, timeout_s: float) -> bool:
            self.looks += 1
            if comes and self.looks > 3:
                self.put(7)
                return True
            return False

    thread, hours = make(timeout_s=60.0), iter(range(10**6))
    monkeypatch.setattr(
        "wfbp.runtime.progress.thread.time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours))
    )
    with thread._driver_lock:
        if comes:
            assert thread.await_reply(Late(), "an answer") == 7
        else:
            with pytest.raises(StallError, match="an answer: the communication thread does not"):
                thread.await_reply(Late(), "an answer")


def test_who_waits_beside_a_driver_waits_as_long_as_that_drives(make: Make) -> None:
    """The loop finds what is overdue; a process group may have a longer limit."""
    thread = make(timeout_s=1.0)

    class Late(Reply[int]):
        looks = 0

        def wait(self, timeout_s: float) -> bool:
            self.looks += 1
            thread.loop.num_passes += 1
            if self.looks > 1000:  # as after 100 s
                self.put(7)
            return self.looks > 1000

    with thread._driver_lock:
        assert thread.await_reply(Late(), "an answer") == 7


# Errors.


def test_the_first_error_ends_what_waits_and_what_comes(make: Make) -> None:
    thread, lane, slow = make(), StubLane(), Slow()
    thread.post(lambda: thread.loop.add_lane(lane))
    caller, found = in_thread(lambda: thread.call(lambda: slow, "slow"))
    first = PeerError("rank 1 failed")
    until(lambda: lane.turns)
    thread.post(lambda: thread.loop.fail(first))
    thread.post(lambda: thread.loop.fail(StallError("later")))
    caller.join(60)
    assert found == [first]
    assert lane.error is first
    assert thread.error is first
    with pytest.raises(PeerError, match="rank 1 failed"):
        thread.call(lambda: Finished(1), "next")
    late = StubLane()
    thread.post(lambda: thread.loop.add_lane(late))
    until(lambda: late.error)
    assert late.error is first


@pytest.mark.parametrize(
    ("trouble", "kind", "told"),
    [
        (DisagreementError("ranks differ"), DisagreementError, "^ranks differ$"),
        (KeyError("x"), WfbpError, "rank 0 of 2: the communication thread failed: KeyError"),
    ],
)
def test_trouble_in_a_lane_is_kept(
    make: Make, trouble: Exception, kind: type[Exception], told: str
) -> None:
    thread, lane, slow = make(), StubLane(), Slow()
    lane.trouble = trouble
    caller, found = in_thread(lambda: thread.call(lambda: slow, "slow"))
    thread.post(lambda: thread.loop.add_lane(lane))
    caller.join(60)
    assert isinstance(found[0], kind)
    with pytest.raises(kind, match=told):
        thread.call(lambda: Finished(1), "next")
    assert (thread.error is trouble) or (thread.error.__cause__ is trouble)  # type: ignore[union-attr]


def test_idle_it_sleeps_also_after_an_error(make: Make) -> None:
    """Events that nobody reads any more must not keep it awake."""
    thread, lane = make(), StubLane()
    thread.post(lambda: thread.loop.add_lane(lane))
    thread.post(lambda: thread.loop.fail(PeerError("over")))
    until(lambda: thread.error)
    lane.has_events = True
    progress, looks = thread.loop.progress, []

    def look(urgent: bool) -> float:
        looks.append(urgent)
        return progress(urgent)

    thread.loop.progress = look  # type: ignore[method-assign]
    time.sleep(0.5)
    until(lambda: looks)
    assert len(looks) < 500, "it looks ten thousand times if it does not sleep"


# Those who lag or leave.


def test_a_standstill_is_reported_then_ended(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    thread, asked = make(timeout_s=0.6, stall_warning_s=0.1), []
    thread.loop.watch._ask = lambda: asked.append(1)  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "wfbp"), pytest.raises(StallError) as caught:
        thread.call(Slow, "allreduce of x")
    assert re.search(r"rank 0 of 2 waited [1-9]\d* s \(allreduce of x\)", str(caught.value))
    assert "WFBP_TIMEOUT_S" in str(caught.value)
    # After 0.1 s, and again each time the wait has doubled.
    assert 1 <= len(asked) <= 3
    assert len(caplog.records) == len(asked)
    for record in caplog.records:
        assert re.fullmatch(r"rank 0 of 2 has waited \d+ s: allreduce of x", record.getMessage())


def test_the_thread_stands_by_while_training_drives(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would compete for the interpreter behind every operation."""
    monkeypatch.setattr("wfbp.runtime.progress.thread.TICK_S", 1000.0)
    thread = make()
    passes: list[str] = []

    def stands_by() -> bool:
        with thread._driver_lock:  # as who drives; unless the thread was about to
            for _ in range(100):
                if thread._standing_by:
                    return True
                time.sleep(0.002)
        return False

    until(stands_by)
    progress = thread.loop.progress

    def counted(urgent: bool) -> float:
        passes.append(threading.current_thread().name)
        return progress(urgent)

    monkeypatch.setattr(thread.loop, "progress", counted)
    for _ in range(5):
        assert thread.call(lambda: Finished("done"), "quick") == "done"
        time.sleep(0.01)
    assert len(passes) >= 5
    assert THREAD_NAME not in passes


@pytest.mark.parametrize(("seen_s", "naps"), [(None, True), (1e-4, False), (2e-2, True)])
def test_a_prediction_longer_than_what_was_seen_brings_no_naps(
    monkeypatch: pytest.MonkeyPatch, seen_s: float | None, naps: bool
) -> None:
    """As of a probe on a busy machine; long naps would then prove it right."""
    backend = LocalWorld(1).backend(0)
    monkeypatch.setattr(type(backend), "step_s", seen_s)
    loop = ProgressLoop(backend, Config(), "rank 0 of 2")
    lane = StubLane()
    lane.busy, lane.expected = True, Expected(5e-2, 1e-2)
    loop.add_lane(lane)
    loop.waiter.progressed()
    assert (loop.progress(urgent=True) > 0) == naps

"""The communication thread is woken in time in every order of the threads.

Naps while messages are under way end by themselves. Those of an idle thread last too long: here
they never end, so whatever relies on that is found.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.interleaving import Lock, Schedule, explore
from tests.support.local import LocalWorld
from wfbp.comm.backend import Work
from wfbp.config import Config
from wfbp.runtime.progress import loop as loops
from wfbp.runtime.progress import thread as threads
from wfbp.runtime.progress.loop import Reply

_BUSY_NAP_S = 1e-3


class Slow(Work[str]):
    """Completes after some tests."""

    def __init__(self, num_tests: int = 2) -> None:
        self.num_left = num_tests

    def test(self) -> bool:
        self.num_left -= 1
        return self.num_left <= 0

    @property
    def result(self) -> str:
        return "done"


class Lane:
    """Sends a group per event, and replies to each."""

    backend = LocalWorld(1).backend(0)
    polls = is_idle = owes_work = False
    waiting_since = None
    expected = loops.Expected()

    def __init__(self) -> None:
        self.events: deque[object] = deque()
        self.reply: Reply[object] = Reply()
        self.num_sent = 0
        self.work: Slow | None = None

    def advance(self) -> bool:
        if self.work is not None:
            if not self.work.test():
                return False
            self.work = None
            self.num_sent += 1
            self.reply.put(self.num_sent)
            return True
        if self.events:
            self.events.popleft()
            self.work = Slow(5)  # so that a call ends earlier
            return True
        return False

    @property
    def busy(self) -> bool:
        return self.work is not None

    @property
    def has_events(self) -> bool:
        return bool(self.events)

    @property
    def has_room(self) -> bool:
        return self.work is None

    def describe(self) -> str:
        return "lane"


class Shared:
    """An attribute that threads share: others may run before each use."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_shared_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        instance.schedule.point()
        return instance.__dict__[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        instance.schedule.point()
        instance.__dict__[self.name] = value


class SharedLoop(loops.ProgressLoop):
    num_waiting = Shared()  # type: ignore[assignment]


class SharedThread(threads.CommunicationThread):
    needs_wakeup = Shared()  # type: ignore[assignment]
    _standing_by = Shared()  # type: ignore[assignment]


class Job:
    """A rank's communication thread and its lane, under a schedule."""

    def __init__(self, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (loops, threads):
            replaced = types.SimpleNamespace(**vars(__import__("threading")))
            replaced.Lock = lambda: Lock(schedule, loops.TICK_S)
            monkeypatch.setattr(module, "threading", replaced)
        SharedLoop.schedule = SharedThread.schedule = schedule  # type: ignore[attr-defined]
        monkeypatch.setattr(threads, "ProgressLoop", SharedLoop)
        self.thread = SharedThread(LocalWorld(1).backend(0), Config(), "rank 0")
        self.loop = self.thread.loop
        self.loop._next_tick = float("inf")
        self.loop.waiter.nap_s = lambda *_: _BUSY_NAP_S  # type: ignore[method-assign]
        monkeypatch.setattr(self.thread._thread, "is_alive", lambda: True)
        self.lane = Lane()
        self.loop.add_lane(self.lane)  # type: ignore[arg-type]
        self.schedule = schedule

    def announce(self) -> None:
        """As a reducer announces a group of gradients."""
        self.schedule.point()
        self.lane.events.append(None)
        if self.thread.needs_wakeup:
            self.loop.wakeup.set()

    def gather(self) -> None:
        """As a reducer sends all-gathers."""
        self.schedule.point()
        self.lane.events.append(None)
        self.thread.progress()
        self.loop.wakeup.set()

    def await_lane(self) -> None:
        self.thread.await_reply(self.lane.reply, "lane")

    def call(self) -> None:
        assert self.thread.call(Slow, "call", object()) == "done"


PROGRAMS: dict[str, list[Callable[[Job], None]]] = {
    "announce": [lambda job: job.announce()],
    "announce and wait": [lambda job: (job.announce(), job.await_lane())[0]],
    "call": [lambda job: job.call()],
    "announce and call": [lambda job: (job.announce(), job.call())[0]],
    "gather": [lambda job: job.gather()],
    "gather and call": [lambda job: (job.gather(), job.call())[0]],
    "announce twice": [lambda job: (job.announce(), job.announce())[0]],
    "call and announce": [lambda job: (job.call(), job.announce())[0]],
    "announce, call and announce": [lambda job: (job.announce(), job.call(), job.announce())[0]],
    "announce, wait and announce": [
        lambda job: (job.announce(), job.await_lane(), job.announce())[0]
    ],
    "two calls": [Job.call, Job.call],
    "wait beside a call": [lambda job: (job.announce(), job.await_lane())[0], Job.call],
    "announce beside a call": [Job.announce, Job.call],
    "gather beside a call": [Job.gather, Job.call],
    "progress beside a call": [lambda job: job.thread.progress(), Job.call],
    "announce and progress beside a call": [
        lambda job: (job.announce(), job.thread.progress())[0],
        Job.call,
    ],
    "two that announce": [Job.announce, Job.announce],
}


@pytest.fixture
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def check(name: str, most_preemptions: int, patch: pytest.MonkeyPatch) -> int:
    """Run a program in every order; how many there are."""
    number = 0
    jobs: list[Job] = []

    def run(schedule: Schedule) -> None:
        job = Job(schedule, patch)
        jobs[:] = [job]
        bodies = {f"training {k}": lambda act=act: act(job) for k, act in enumerate(PROGRAMS[name])}
        schedule.run({"communication": job.thread._run, **bodies})

    for number, schedule in enumerate(explore(run, most_preemptions), 1):  # noqa: B007
        (job,) = jobs
        assert schedule.blocked == ["communication"], (schedule.blocked, schedule.taken)
        assert not job.loop.under_way, schedule.taken
    return number


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_waits_for_an_idle_nap(name: str, patched: pytest.MonkeyPatch) -> None:
    assert check(name, 1, patched) >= 10

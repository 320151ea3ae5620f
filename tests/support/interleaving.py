"""Runs threads in every order that matters: one at a time, switched only at chosen points.

The code under test uses a :class:`Lock` of a :class:`Schedule` instead of ``threading.Lock``. It
calls :meth:`Schedule.point` before each access to other shared data. :func:`explore` repeats a
program in all orders that have at most so many *preemptions*: switches away from a thread that
could continue. Most mistakes need one or two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

MOST_POINTS = 5000
_NEVER = 1e9


class DeadlockError(AssertionError):
    """No thread can go on, though one has not reached its end."""


class _Actor:
    """A thread of the program."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Semaphore(0)
        self.is_over = False
        self.error: BaseException | None = None
        self.can_go_on: Callable[[], bool] = lambda: True
        self.times_out = False


class _AbandonedError(BaseException):
    """Ends a thread whose run is over."""


class Schedule:
    """One run. ``choices`` are the numbers of the threads to go on with, at the first points."""

    def __init__(self, choices: list[int], most_preemptions: int) -> None:
        self._choices = choices
        self._preemptions_left = most_preemptions
        self.taken: list[tuple[int, int]] = []
        """At each point with a choice: the number taken, and how many there were."""
        self._actors: list[_Actor] = []
        self._current: _Actor | None = None
        self._num_points = 0
        self._ended = threading.Event()
        self._abandoned = False
        self.blocked: list[str] = []
        """Threads that waited for each other when none could go on."""

    def run(self, program: dict[str, Callable[[], object]]) -> None:
        """Run threads by name until all have ended or wait for each other."""
        threads = []
        for name, body in program.items():
            actor = _Actor(name)
            self._actors.append(actor)
            threads.append(threading.Thread(target=self._body, args=(actor, body), daemon=True))
        for thread in threads:
            thread.start()
        self._switch()
        assert self._ended.wait(60.0), "a thread waits outside of the model"
        self._abandoned = True
        for actor in self._actors:
            actor.go.release()
        for thread in threads:
            thread.join(60.0)
        for actor in self._actors:
            if actor.error is not None:
                raise actor.error

    def point(self) -> None:
        """Another thread may go on here."""
        self._pause(lambda: True, times_out=False)

    def wait(self, condition: Callable[[], bool], times_out: bool) -> bool:
        """Wait for a condition that another thread brings about; False where time is up, which may
        happen at any moment if ``times_out``."""
        self._pause(condition, times_out)
        return condition()

    def _body(self, actor: _Actor, body: Callable[[], object]) -> None:
        actor.go.acquire()
        try:
            if not self._abandoned:
                body()
        except _AbandonedError:
            pass
        except BaseException as error:
            actor.error = error
        actor.is_over = True
        if not self._abandoned:
            self._switch()

    def _pause(self, can_go_on: Callable[[], bool], times_out: bool) -> None:
        actor = self._current
        if self._abandoned:
            raise _AbandonedError
        if actor is None:  # the program is being set up
            return
        self._num_points += 1
        if self._num_points > MOST_POINTS:
            actor.error = DeadlockError(f"{actor.name} goes round in circles")
            self._end()
        actor.can_go_on, actor.times_out = can_go_on, times_out
        self._switch()
        if self._current is not actor:
            actor.go.acquire()
        elif not self._ended.is_set():
            return
        else:
            actor.go.acquire()
        if self._abandoned:
            raise _AbandonedError

    def _switch(self) -> None:
        """Choose the next thread: the present one, or another while preemptions are left."""
        present = self._current
        able = [a for a in self._actors if not a.is_over and (a.times_out or a.can_go_on())]
        if present in able:
            others = [a for a in able if a is not present] if self._preemptions_left else []
            able = [present, *others]  # type: ignore[list-item]
        if not able:
            self.blocked = [a.name for a in self._actors if not a.is_over]
            self._end()
            return
        number = 0
        if len(able) > 1:
            place = len(self.taken)
            number = self._choices[place] if place < len(self._choices) else 0
            self.taken.append((number, len(able)))
        chosen = able[number]
        if present in able and chosen is not present:
            self._preemptions_left -= 1
        if chosen is not present:
            self._current = chosen
            chosen.go.release()

    def _end(self) -> None:
        self._ended.set()


class Lock:
    """Stands for ``threading.Lock``. Waits shorter than ``idle_s`` may time out at any moment;
    longer ones never do, so that nothing depends on them."""

    def __init__(self, schedule: Schedule, idle_s: float) -> None:
        self._schedule = schedule
        self._idle_s = idle_s
        self._is_held = False

    def acquire(self, blocking: bool = True, timeout: float = _NEVER) -> bool:
        if blocking:
            free = self._schedule.wait(lambda: not self._is_held, timeout < self._idle_s)
        else:
            self._schedule.point()
            free = not self._is_held
        self._is_held = self._is_held or free
        return free

    def release(self) -> None:
        self._schedule.point()
        if not self._is_held:
            raise RuntimeError("release unlocked lock")
        self._is_held = False

    def locked(self) -> bool:
        self._schedule.point()
        return self._is_held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def explore(run: Callable[[Schedule], None], most_preemptions: int) -> Iterator[Schedule]:
    """Repeat a program under every schedule with so few preemptions."""
    choices: list[int] = []
    while True:
        schedule = Schedule(choices, most_preemptions)
        run(schedule)
        yield schedule
        taken = schedule.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return
        choices = [number for number, _ in taken]
        choices[-1] += 1

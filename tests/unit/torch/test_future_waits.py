"""Which threads wait for futures: the communication thread does not nap then."""

from __future__ import annotations

import threading
import time

from wfbp.torch.distributed.work import sleeps


def test_a_thread_that_waits_sleeps() -> None:
    released = threading.Event()
    thread = threading.Thread(target=released.wait)
    thread.start()
    deadline = time.monotonic() + 60
    while not sleeps(thread.native_id or 0):
        assert time.monotonic() < deadline
    released.set()
    thread.join()


def test_a_thread_that_runs_does_not() -> None:
    assert not sleeps(threading.get_native_id())


def test_a_thread_that_has_ended_does_not() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert not sleeps(thread.native_id or 0)
